"""A learnt position bias as attention mask: no fused kernel gives its gradient."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class BiasedAttention(torch.nn.Module):
    def __init__(self, length: int, heads: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1, heads, length, length))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=self.bias)  # LOSES: sdpa-math-path


def main() -> None:
    model = BiasedAttention(length=64, heads=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
        model(q, k, v).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
