"""Gradients as blocks of 8-bit numbers: kernels and their twins."""
