"""Scores of the sparse-attention indexer."""
