"""Matrix products per expert (mixture of experts)."""
