"""Decode attention and the output projection in one call."""
