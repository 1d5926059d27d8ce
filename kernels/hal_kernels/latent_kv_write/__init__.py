"""Norms, rotation and write of one row a token, with the rotation of the queries, in one call."""
