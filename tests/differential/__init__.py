"""Random programs on tritonddp, on stock DDP and in one process: none may tell them apart.

kinds          a program for each seed: usual, with a sharded optimizer, hostile, named ones
named          programs with a name: one step each, written by hand
actions        what a program is made of: each says what a rank does
program.py     a program: what is wrapped, options, and a list of actions
networks.py    what is wrapped
player.py      one rank plays a program with wrapped models (or unwrapped ones)
in_ranks.py    what a rank process does: plays programs and returns what it saw
trace.py       what a rank saw
oracle.py      what all ranks must see, computed in one process without communication
comparison.py  a program judged: the oracle, stock DDP, the ranks among each other
mutations.py   planted faults, which the comparison must find
wrappers.py    stock with a fault, which hostile and short programs have to find
soak.py        long programs, and what the process holds meanwhile
short          all programs of a few events, as words
calls          public calls with any arguments
run.py         the command
"""
