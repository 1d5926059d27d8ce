"""Enflame GCUs."""
