"""What a rank does: each action is a dataclass whose ``perform`` does it.

training    forwards, backwards, steps, and what changes the network between them
misuse      calls that are refused, on some ranks
probes      backwards through the module, by one rank alone, or a few on each
buffers     buffers written in any way at any moment
gradients   users that hold, copy, mark, free and change gradients
wrapping    another wrapper of the same module, and an old one that is still held
names       the user's attributes on the wrapper
modes       inference_mode, default dtypes and devices, modes that count
"""
