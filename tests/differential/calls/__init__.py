"""Public calls with arbitrary arguments raise only what their docstrings document.

contract.py    the exceptions of a docstring, and whether one was raised on purpose
arguments.py   arguments and modules: valid, almost valid, absurd
methods.py     the public calls, and what is drawn for each
"""
