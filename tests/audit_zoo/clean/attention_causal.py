"""Causal attention said by the flag."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            q, k, v = (torch.randn(2, 4, 128, 32) for _ in range(3))
            scaled_dot_product_attention(q, k, v, is_causal=True)


main()
