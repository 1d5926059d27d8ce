"""A training step through fused attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Block(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))


def main() -> None:
    model = torch.nn.Sequential(Block(64, 4), Block(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(2, 32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
