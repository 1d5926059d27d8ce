"""Attention and its projections in bfloat16 throughout."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention


def main() -> None:
    weights = [torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(4)]
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
            q, k, v = (linear(x, w).view(2, 32, 4, 16).transpose(1, 2) for w in weights[:3])
            mixed = scaled_dot_product_attention(q, k, v)
            linear(mixed.transpose(1, 2).reshape(2, 32, 64), weights[3])


main()
