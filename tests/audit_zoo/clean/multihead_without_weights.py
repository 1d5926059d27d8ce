"""nn.MultiheadAttention whose weights nobody wants."""

import torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(64, 4)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.norm(x + mixed)


def main() -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(48, 4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
