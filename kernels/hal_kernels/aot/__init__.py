"""Ahead-of-time compilation of the Triton kernels, and what the machine code proves about them."""
