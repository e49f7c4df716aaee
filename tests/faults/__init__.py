"""Ranks that die, stop, fall behind, raise or differ: what the other ranks see.

points.py       where a fault strikes: places in the library and in a training loop
table.py        the faults: kind x point x ranks, and the errors that the other ranks must raise
program.py      the training of each rank, and how a fault strikes it
differences.py  what one rank does differently
player.py       forks the ranks of each fault, and ends them in bounded time
verdict.py      compares what the ranks saw with what was expected
test_faults.py  all faults; the messages of the pages about failures
"""
