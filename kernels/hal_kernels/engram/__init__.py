"""n-gram embeddings by hash, mixed into the residual streams."""
