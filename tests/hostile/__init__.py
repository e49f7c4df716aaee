"""Programs of people who know nothing of this package: right under stock, hard on a clever one.

record.py      what a program notes down, on each rank
table.py       the programs, and what one may say of itself: a difference that the page names
beside.py      a program with stock DDP and with tritonddp, and how they differ
backwards      a backward that goes through no forward of the wrapper is local
buffers        they are rank 0's at each forward
gradients      they are the user's tensors
order          of wrappers with a group each
names          on the wrapper
overrides      of named_parameters() and its like
strictness     of find_unused_parameters=False

A program is a function that is decorated with :func:`hostile.table.program` and gets the class to
wrap with, and what notes down what it sees. ``pytest tests/hostile -k gradients`` plays some.
"""
