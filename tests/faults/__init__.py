"""Ranks that die, stop, skip steps, raise or differ, and the errors of the other ranks.

points.py       the places of faults in the package and in a training loop
table.py        the faults: kind x point x ranks, and the expected errors of the other ranks
program.py      the training of each rank, with its fault
differences.py  the different program of one rank
player.py       forks the ranks of each fault, and ends them in bounded time
verdict.py      compares the results of the ranks with the expected results
test_faults.py  all faults; the messages on the pages about failures
"""
