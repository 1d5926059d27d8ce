"""Attention with projections, strided views instead of copies."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


def main() -> None:
    model = Attention(128, 4).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 48, 128))


main()
