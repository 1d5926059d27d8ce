"""Blocks of keys or values compressed to entries by an MLP, for native sparse attention."""
