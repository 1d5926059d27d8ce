"""Norms of q and k, rotary position embedding and KV write in one pass."""
