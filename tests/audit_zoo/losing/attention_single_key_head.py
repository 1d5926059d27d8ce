"""One head of keys and values for all queries, left to broadcasting instead of enable_gqa."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    with torch.no_grad():
        for _ in range(2):
            q = torch.randn(2, 8, 64, 32)
            k, v = torch.randn(2, 1, 64, 32), torch.randn(2, 1, 64, 32)
            scaled_dot_product_attention(q, k, v)  # LOSES: sdpa-math-path


main()
