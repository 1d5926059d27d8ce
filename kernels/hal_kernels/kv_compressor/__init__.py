"""Gated pooling of windows of tokens into compressed entries."""
