"""Gradients are the user's tensors: held, marked, copied, freed."""
