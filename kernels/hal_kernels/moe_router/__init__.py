"""Choice of experts per token from router logits."""
