"""Gradients as blocks of 8-bit or 4-bit numbers: Triton kernels, and twins in plain torch."""
