"""A sliding window: no flag says that, a mask has to."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    distance = torch.arange(128)[:, None] - torch.arange(128)[None, :]
    window = (distance >= 0) & (distance < 16)
    with torch.inference_mode():
        for _ in range(2):
            q, k, v = (torch.randn(2, 4, 128, 32) for _ in range(3))
            scaled_dot_product_attention(q, k, v, attn_mask=window)


main()
