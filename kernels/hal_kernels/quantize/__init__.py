"""Per-token int8 rounding of activations."""
