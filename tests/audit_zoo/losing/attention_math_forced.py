"""The math backend, forced for a comparison once and left in."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # LOSES: fused-attention-disabled
        # LOSES: sdpa-math-path
        return scaled_dot_product_attention(q, k, v)


def main() -> None:
    with torch.no_grad():
        for _ in range(2):
            attend(*(torch.randn(2, 4, 64, 32) for _ in range(3)))


main()
