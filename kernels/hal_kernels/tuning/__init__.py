"""Configurations of kernels on devices: chosen by measurement or by a model, kept as data."""
