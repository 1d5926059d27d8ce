"""Model families, built from shared parts."""
