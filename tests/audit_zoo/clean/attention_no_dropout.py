"""Attention that has dropout in training only."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def main() -> None:
    model = Attention(0.1).eval()
    with torch.no_grad():
        for _ in range(3):
            model(*(torch.randn(2, 4, 64, 32) for _ in range(3)))


main()
