"""A library that says once, in a warning, that it takes the slow path."""

import warnings

import torch


def scan(x: torch.Tensor) -> torch.Tensor:
    message = "selective_scan is not installed: falling back to the sequential implementation"
    warnings.warn(message, stacklevel=1)  # LOSES: announced-fallback
    return torch.cumsum(x, dim=-1)


def main() -> None:
    with torch.inference_mode():
        scan(torch.randn(16, 64))


main()
