"""A padding mask for a batch that has padding."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    lengths = torch.tensor([96, 64])
    mask = (torch.arange(96)[None, :] < lengths[:, None])[:, None, None, :].expand(2, 1, 96, 96)
    with torch.inference_mode():
        for _ in range(2):
            q, k, v = (torch.randn(2, 4, 96, 32) for _ in range(3))
            scaled_dot_product_attention(q, k, v, attn_mask=mask)


main()
