"""The actions of a program: dataclasses whose ``perform`` is called on each rank."""
