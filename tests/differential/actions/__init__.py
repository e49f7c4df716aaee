"""The actions of a program: dataclasses whose ``perform`` is called on each rank.

training    forwards, backwards, steps, and changes of the network or its wrapper between them
probes      backwards that bypass the wrapper, on one rank or on some
buffers     buffers that some ranks write
gradients   users that hold, copy, free and change gradients
named       a step of a named program
"""
