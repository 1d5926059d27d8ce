"""A mixture of experts that multiplies expert by expert."""

import torch


class Experts(torch.nn.Module):
    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(count, hidden, hidden))

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert, weight in enumerate(self.weights):
            out += share[:, expert, None] * (x @ weight)  # LOSES: loop-of-small-products
        return out


def main() -> None:
    model = Experts(16, 64).eval()
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(8, 64)
            model(x, torch.softmax(torch.randn(8, 16), dim=-1))


main()
