"""Grouped queries the way many model files do it: expand, then a reshape that copies."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def repeat_kv(x: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, length, head_dim = x.shape
    x = x[:, :, None].expand(batch, heads, groups, length, head_dim)
    return x.reshape(batch, heads * groups, length, head_dim)  # LOSES: kv-heads-expanded


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            q = torch.randn(2, 8, 64, 32)
            k, v = torch.randn(2, 2, 64, 32), torch.randn(2, 2, 64, 32)
            scaled_dot_product_attention(q, repeat_kv(k, 4), repeat_kv(v, 4), is_causal=True)


main()
