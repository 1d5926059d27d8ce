"""Attention in inference that keeps the dropout of training."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    with torch.no_grad():
        for _ in range(3):
            # LOSES: sdpa-math-path, dropout-left-on
            q = scaled_dot_product_attention(q, k, v, dropout_p=0.1)


main()
