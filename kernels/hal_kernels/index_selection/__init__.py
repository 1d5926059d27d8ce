"""The indexer's scores and the choice among them, without a score of every pair in memory."""
