"""Keys kept transposed, so that head_dim is not contiguous when attention reads them."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    transposed_keys = torch.randn(2, 4, 32, 64)  # [batch, heads, head_dim, length]
    with torch.no_grad():
        for _ in range(2):
            q, v = torch.randn(2, 4, 64, 32), torch.randn(2, 4, 64, 32)
            k = transposed_keys.transpose(-1, -2)
            scaled_dot_product_attention(q, k, v)  # LOSES: sdpa-math-path


main()
