"""Top-k and top-p filters of logits."""
