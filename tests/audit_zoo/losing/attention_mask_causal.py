"""A lower triangle as mask, where is_causal would skip half of the work."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    length = 128
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.inference_mode():
        for _ in range(2):
            q, k, v = (torch.randn(2, 4, length, 32) for _ in range(3))
            scaled_dot_product_attention(q, k, v, attn_mask=mask)  # LOSES: sdpa-needless-mask


main()
