"""A simulation in double precision, as it is meant."""

import torch


def main() -> None:
    matrix = torch.randn(64, 64, dtype=torch.float64)
    state = torch.randn(64, 64, dtype=torch.float64)
    with torch.inference_mode():
        for _ in range(4):
            state = torch.tanh(matrix @ state)


main()
