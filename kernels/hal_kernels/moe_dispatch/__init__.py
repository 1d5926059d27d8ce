"""Rows sorted by expert, and their weighted sum per token."""
