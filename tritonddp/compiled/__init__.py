"""Compilation of a forward into one graph, whose backward announces each gradient."""
