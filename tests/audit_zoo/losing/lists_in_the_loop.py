"""Activations that take a detour through Python lists."""

import torch


def main() -> None:
    x, weight = torch.randn(32, 64), torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            rows = (x @ weight).tolist()  # LOSES: python-values-in-the-loop
            x = torch.tensor([[max(value, 0.0) for value in row] for row in rows])


main()
