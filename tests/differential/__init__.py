"""Random programs on tritonddp, on stock DDP and in one process must see the same.

kinds          a program for each seed: usual, with a sharded optimizer, hostile, named
named          programs with a name, written by hand
actions        the actions of a program: what each rank does
program.py     a program: what is wrapped, options, and a list of actions
networks.py    what is wrapped
player.py      one rank plays a program, with wrapped or unwrapped models
in_ranks.py    a rank process: plays programs and returns what it saw
trace.py       what a rank saw
oracle.py      what all ranks must see, computed in one process without communication
comparison.py  compares a program with the oracle, with stock DDP, and between the ranks
wrappers.py    wrappers with a fault, which programs must find
soak.py        long programs, and whether memory and files grow
short          all programs of a few events, as words
test_calls.py  public calls with arbitrary arguments
run.py         the command
"""
