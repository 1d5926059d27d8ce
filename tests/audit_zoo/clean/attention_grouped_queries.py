"""Grouped queries with the heads as they are."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            q = torch.randn(2, 8, 64, 32)
            k, v = torch.randn(2, 2, 64, 32), torch.randn(2, 2, 64, 32)
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


main()
