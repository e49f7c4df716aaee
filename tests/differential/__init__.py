"""Random programs on tritonddp, on stock DDP and in one process: none may tell them apart.

described.py   how what is drawn shows itself
networks.py    what is wrapped
scenario.py    what is done with it: options and a list of actions
generator.py   a scenario for each seed
player.py      one rank plays a scenario with a wrapped model (or an unwrapped one)
in_ranks.py    what a rank process does: plays scenarios and returns what it saw
trace.py       what a rank saw
oracle.py      what all ranks must see, computed in one process without communication
comparison.py  a scenario judged: the oracle, stock DDP, the ranks among each other
mutations.py   planted faults, which the comparison must find
run.py         the command
hostile        programs that are hard on a clever wrapper, beside stock alone
"""
