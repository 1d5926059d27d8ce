"""Index lists of the largest indexer scores."""
