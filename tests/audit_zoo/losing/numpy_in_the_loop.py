"""A norm by numpy in the middle of the model."""

import numpy as np
import torch


def normalise(x: torch.Tensor) -> torch.Tensor:
    values = x.numpy()  # LOSES: numpy-in-the-loop
    return torch.from_numpy(values / np.linalg.norm(values, axis=-1, keepdims=True))


def main() -> None:
    x, weight = torch.randn(32, 64), torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            x = normalise(x @ weight)


main()
