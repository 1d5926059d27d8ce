"""Queries, keys and values copied to be contiguous, though attention takes them as they are."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in parts)  # LOSES: contiguous-each-step
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    model = Attention(128, 4).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 48, 128))


main()
