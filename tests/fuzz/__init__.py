"""Any arguments: what comes out is what the docstrings say.

examples.py    how many are drawn
models.py      what is wrapped, and the step that has to be right
contract.py    which exceptions a docstring announces, and whether one was raised on purpose
arguments.py   arguments for each call: valid, nearly valid, absurd
calls.py       the public calls
"""
