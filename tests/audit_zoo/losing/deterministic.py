"""Deterministic algorithms, switched on for a test and never off."""

import torch


def main() -> None:
    model = torch.nn.Conv2d(3, 8, 3).eval()
    torch.use_deterministic_algorithms(True)  # LOSES: deterministic-algorithms
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 3, 16, 16))


try:
    main()
finally:
    torch.use_deterministic_algorithms(False)
