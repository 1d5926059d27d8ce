"""A kernel library that is not there, and a program that does not mind."""

import torch
from torch.nn.functional import scaled_dot_product_attention

try:
    from flash_attn import flash_attn_func  # LOSES: swallowed-error
except ImportError:
    flash_attn_func = None


def main() -> None:
    with torch.inference_mode():
        q, k, v = (torch.randn(2, 64, 4, 32) for _ in range(3))
        if flash_attn_func is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            scaled_dot_product_attention(q, k, v, is_causal=True)


main()
