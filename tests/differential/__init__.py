"""Random programs on tritonddp, on stock DDP and in one process must see the same.

kinds          draw a program for each seed: usual, with a sharded optimizer, hostile
actions        what each rank does in a program
named          training steps with a name, written by hand
short          all programs of a few events: a program is a word, one letter an event
networks.py    what is wrapped
player.py      one rank plays a program, with wrapped or unwrapped models
in_ranks.py    a rank process: plays a program in several ways, and returns what it saw
oracle.py      what all ranks must see, computed in one process without communication
comparison.py  compares a program with the oracle, with stock DDP, and between the ranks
soak.py        long programs: does memory grow?
run.py         the command
"""
