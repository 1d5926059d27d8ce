"""A table made by numpy is float64, and everything that it touches as well."""

import numpy as np
import torch


def main() -> None:
    table = torch.from_numpy(np.sin(np.linspace(0.0, 10.0, 128 * 64).reshape(128, 64)))
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(128, 64)
            x = x + table  # LOSES: float64-promotion
            x = x @ weight.double()  # LOSES: float64-product, cast-each-call


main()
