"""Programs of people who know nothing of this package: right under stock, hard on a clever one.

Written by hand, since no generator draws them: what ``tests/differential`` can draw is drawn there
(``--kind hostile``).

table.py       the programs, and what one may say of itself: a difference that the page names
beside.py      a program with stock DDP and with tritonddp, and how they differ
collectives    modules that make collectives of their own in the backward
others         scripted modules, old wrappers with views, hooks of the old kind, waits in callbacks

A program is a function that is decorated with :func:`hostile.table.program` and gets the class to
wrap with, and what notes down what it sees. ``pytest tests/hostile -k collectives`` plays some.
"""
