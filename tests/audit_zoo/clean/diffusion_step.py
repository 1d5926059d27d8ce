"""A small denoiser with group norm, convolutions and time embedding."""

import torch


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Conv2d(4, 32, 3, padding=1),
            torch.nn.Conv2d(32, 4, 3, padding=1),
        )
        self.norm, self.time = torch.nn.GroupNorm(8, 32), torch.nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(8, dtype=torch.float32))
        angles = time[:, None] * frequencies
        shift = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))[:, :, None, None]
        return self.second(torch.nn.functional.silu(self.norm(self.first(x)) + shift))


def main() -> None:
    model = Denoiser().eval()
    x = torch.randn(1, 4, 16, 16)
    with torch.inference_mode():
        for step in range(4):
            x = x - 0.1 * model(x, torch.tensor([float(step)]))


main()
