"""Values with another head_dim than queries and keys: beyond what the fused kernel takes."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    with torch.no_grad():
        for _ in range(2):
            q, k = torch.randn(2, 4, 64, 48), torch.randn(2, 4, 64, 48)
            v = torch.randn(2, 4, 64, 32)
            scaled_dot_product_attention(q, k, v, is_causal=True)  # LOSES: sdpa-math-path


main()
