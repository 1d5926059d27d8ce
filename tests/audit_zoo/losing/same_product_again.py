"""The context is projected again for every token, although it does not change."""

import torch


def main() -> None:
    context, weight = torch.randn(64, 128), torch.randn(128, 128)
    with torch.inference_mode():
        for _ in range(4):
            token = torch.randn(1, 128)
            keys = context @ weight  # LOSES: same-product-again
            token @ keys.T


main()
