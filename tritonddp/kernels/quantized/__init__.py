"""Gradients as blocks of 8-bit numbers: Triton kernels, and the same in plain torch."""
