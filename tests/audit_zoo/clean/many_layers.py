"""Many layers from one line: each has its own weights and its own input."""

import torch


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(64), torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def main() -> None:
    model = torch.nn.Sequential(*(Layer() for _ in range(16))).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 8, 64))


main()
