"""Any arguments: what comes out is what the docstrings say.

contract.py    which exceptions a docstring announces, and whether one was raised on purpose
arguments.py   arguments and modules: valid, nearly valid, absurd
calls.py       the public calls

Sequences of calls, and calls that some ranks alone get wrong, are drawn by ``tests/differential``.
"""
