"""A table made by numpy, brought to the dtype of the data."""

import numpy as np
import torch


def main() -> None:
    table = np.sin(np.linspace(0.0, 10.0, 128 * 64).reshape(128, 64))
    positions = torch.from_numpy(table.astype(np.float32))
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            (torch.randn(128, 64) + positions) @ weight


main()
