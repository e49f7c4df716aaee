"""Comparison of the speed and the results of two wrappers, with one script, in turns."""
