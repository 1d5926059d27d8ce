"""Grouped queries: keys and values repeated for each head before attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            q = torch.randn(2, 8, 64, 32)
            k, v = torch.randn(2, 2, 64, 32), torch.randn(2, 2, 64, 32)
            k = k.repeat_interleave(4, dim=1)  # LOSES: kv-heads-expanded
            v = v.repeat_interleave(4, dim=1)  # LOSES: kv-heads-expanded
            scaled_dot_product_attention(q, k, v, is_causal=True)


main()
