"""Matrix products with a clamped gate, a residual or rounding to FP8 in their store."""
