"""Write of new keys and values into the paged cache."""
