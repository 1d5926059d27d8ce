"""A norm and the rounding of its rows in one call."""
