"""A KV cache allocated once and written into."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    length = 64
    k_cache, v_cache = torch.zeros(1, 4, length, 32), torch.zeros(1, 4, length, 32)
    with torch.inference_mode():
        for position in range(8):
            q, k, v = (torch.randn(1, 4, 1, 32) for _ in range(3))
            k_cache[:, :, position : position + 1] = k
            v_cache[:, :, position : position + 1] = v
            seen = position + 1
            scaled_dot_product_attention(q, k_cache[:, :, :seen], v_cache[:, :, :seen])


main()
