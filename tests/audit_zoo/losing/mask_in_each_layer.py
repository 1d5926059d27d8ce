"""A bias and a mask that every layer merges again."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(x: torch.Tensor, bias: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    mask = torch.where(allowed, bias, -1e9)  # LOSES: mask-made-again
    return scaled_dot_product_attention(x, x, x, attn_mask=mask)


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            x, bias = torch.randn(2, 4, 48, 32), torch.randn(2, 4, 48, 48)
            allowed = torch.rand(2, 1, 48, 48) < 0.9
            for _ in range(4):
                x = attend(x, bias, allowed)


main()
