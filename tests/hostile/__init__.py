"""Programs of people who know nothing of this package: right under stock, hard on a clever one.

record.py      what a program notes down, on each rank
outcomes.py    what a program may say of itself: a difference that the page names
beside.py      a program with stock DDP and with tritonddp, and how they differ
run.py         the command
backwards      a backward that goes through no forward of the wrapper is local
buffers        they are rank 0's at each forward
gradients      they are the user's tensors
order          of wrappers with a group each
names          on the wrapper
strictness     of find_unused_parameters=False

A program is a module with a function ``program(DDP, record)``, which gets the class to wrap with.
It may say ``RANKS`` (2), ``LIMIT``, the seconds that it may take, and ``EXPECTED``, an outcome that
is not stock's.
"""
