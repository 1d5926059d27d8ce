"""Tecorigin accelerators."""
