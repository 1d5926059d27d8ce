"""A warning that is not about speed."""

import warnings

import torch


def main() -> None:
    warnings.warn("this checkpoint is from an older version", stacklevel=1)
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            torch.randn(8, 64) @ weight


main()
