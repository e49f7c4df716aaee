"""The actions of a program: dataclasses whose ``perform`` is called on each rank.

training    forwards, backwards, steps, and changes of the network between them
probes      backwards that bypass the wrapper, on one rank or on some
buffers     buffers that some ranks write
gradients   users that hold, copy, free and change gradients
wrapping    another wrapper of the same module, and an old one that is still held
named       a step of a named program
"""
