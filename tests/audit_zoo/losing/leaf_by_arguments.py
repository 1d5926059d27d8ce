"""One line of attention; only the layers with a window take the slow path."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    # LOSES: leaf-by-arguments, sdpa-math-path
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def main() -> None:
    window = (torch.arange(64)[None, :] - torch.arange(64)[:, None]).abs() < 8
    with torch.inference_mode():
        for layer in range(4):
            q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
            attend(q, k, v, window[None] if layer % 2 else None)


main()
