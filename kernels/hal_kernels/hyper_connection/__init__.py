"""Residual streams mixed before and after a sublayer."""
