"""Beam search that copies its caches into another order at each step."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    k_cache, v_cache = torch.zeros(4, 4, 8, 32), torch.zeros(4, 4, 8, 32)
    with torch.inference_mode():
        for length in range(1, 8):
            q = torch.randn(4, 4, 1, 32)
            k_cache[:, :, length], v_cache[:, :, length] = torch.randn(2, 4, 4, 32).unbind(0)
            beams = torch.randint(0, 4, (4,))
            k = k_cache[:, :, : length + 1].index_select(0, beams)  # LOSES: kv-cache-reordered
            v = v_cache[:, :, : length + 1].index_select(0, beams)  # LOSES: kv-cache-reordered
            k_cache[:, :, : length + 1], v_cache[:, :, : length + 1] = k, v
            scaled_dot_product_attention(q, k, v)


main()
