"""A transposed weight given to a product as the view that it is."""

import torch


def main() -> None:
    weight = torch.nn.Parameter(torch.randn(128, 128))
    with torch.no_grad():
        for _ in range(4):
            torch.randn(4, 128) @ weight.T


main()
