"""Positions computed in float64 once, and used in float32."""

import torch


class Positions(torch.nn.Module):
    table: torch.Tensor

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        rates = 10000.0 ** -(torch.arange(hidden, dtype=torch.float64) / hidden)
        table = torch.sin(torch.arange(length).float()[:, None] * rates)
        self.register_buffer("table", table.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def main() -> None:
    model = Positions(64, 64).eval()
    with torch.inference_mode():
        for _ in range(4):
            model(torch.randn(2, 64, 64))


main()
