"""Attention by einsum, heads last, in a module with projections."""

import torch


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1)  # LOSES: attention-by-hand
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out(mixed.reshape(batch, length, hidden))


def main() -> None:
    model = Attention(128, 4).eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, 48, 128))


main()
