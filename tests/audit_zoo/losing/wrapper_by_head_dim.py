"""A wrapper called fast_attention that is fast for some head_dims only."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def fast_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.shape[-1] <= 64:
        return scaled_dot_product_attention(q, k, v)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v  # LOSES: wrapper-branches-by-head-dim, attention-by-hand


def main() -> None:
    with torch.inference_mode():
        for head_dim in (32, 64, 96):
            fast_attention(*(torch.randn(2, 4, 64, head_dim) for _ in range(3)))


main()
