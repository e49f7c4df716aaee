"""Ranks that die, stop, fall behind, raise or differ: what the other ranks see.

points.py   where a fault strikes: places in the library and in a training loop
table.py    the faults: kind x point x ranks, and what is expected of the ranks that are left
program.py  what each rank runs, and how a fault strikes it
network.py  what it trains
differences.py  what one rank does otherwise than the others
player.py   real processes: forks the ranks of each fault, and ends them in bounded time
page.py     the messages that the pages about failures show
verdict.py  is that what was expected?
"""
