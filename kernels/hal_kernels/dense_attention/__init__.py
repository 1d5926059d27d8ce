"""Attention over dense keys and values with any mask."""
