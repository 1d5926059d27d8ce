"""A matrix product as an outer product and a sum."""

import torch


def main() -> None:
    weight = torch.randn(64, 96)
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(48, 64)
            partial = x[:, :, None] * weight[None]  # LOSES: product-by-broadcast
            partial.sum(dim=1)


main()
