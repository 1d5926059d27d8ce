"""Attention of a prompt over listed blocks of a paged KV cache."""
