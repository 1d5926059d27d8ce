"""Embedding gather."""
