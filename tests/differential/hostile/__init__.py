"""Random programs of the kinds that are right under stock DDP and hard on a clever wrapper.

Stock DDP is the judge: what each rank sees is the same, bit by bit on two ranks.

program.py     a program: what is wrapped, and a list of actions, in words too
networks.py    what is wrapped: small networks with buffers that are written in all ways
training.py    what every training does: forwards, backwards, steps, evaluations
collectives.py modules with collectives of their own in the backward
modes.py       inference_mode, default dtypes and devices, modes that count
backwards.py   backwards through the module, by one rank alone, or a few on each
buffers.py     buffers written in any way at any moment
gradients.py   users that hold, copy, mark, free and change gradients
wrappers.py    another wrapper of the same module, and an old one that is still held
groups.py      two wrappers with a group each, in any order
names.py       the user's attributes on the wrapper
generator.py   a program for each seed
player.py      one rank plays a program
in_ranks.py    what a rank process does: it plays programs with both classes, and compares
faults.py      stock with a fault, which the programs have to find
comparison.py  what has come of a list of seeds
"""
