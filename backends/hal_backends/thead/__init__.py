"""T-Head PPUs."""
