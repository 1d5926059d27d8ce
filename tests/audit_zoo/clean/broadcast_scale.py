"""Broadcast scaling followed by a mean: elementwise work, and no product in disguise."""

import torch


def main() -> None:
    scale = torch.rand(1, 1, 64)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(8, 32, 64)
            (x * scale).mean(dim=1)


main()
