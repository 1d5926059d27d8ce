"""Attention over a sliding window and compressed entries with sinks."""
