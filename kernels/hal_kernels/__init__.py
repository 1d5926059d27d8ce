"""Kernels, one folder per op."""
