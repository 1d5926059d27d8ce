"""A KV cache that grows by concatenation: quadratic copying."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    k_cache, v_cache = torch.randn(1, 4, 32, 32), torch.randn(1, 4, 32, 32)
    with torch.inference_mode():
        for _ in range(8):
            q, k, v = (torch.randn(1, 4, 1, 32) for _ in range(3))
            k_cache = torch.cat([k_cache, k], dim=2)  # LOSES: kv-cache-concatenated
            v_cache = torch.cat([v_cache, v], dim=2)  # LOSES: kv-cache-concatenated
            scaled_dot_product_attention(q, k_cache, v_cache)


main()
