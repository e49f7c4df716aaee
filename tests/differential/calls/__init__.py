"""Public calls with any arguments: what is raised is what the docstrings say.

contract.py    which exceptions a docstring documents, and whether one was raised on purpose
arguments.py   arguments and modules: valid, nearly valid, absurd
methods.py     the public calls, each with what is drawn for it

The other programs of ``tests/differential`` contain sequences of calls, and calls that some ranks
alone get wrong (``actions/misuse.py``).
"""
