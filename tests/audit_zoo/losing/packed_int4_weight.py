"""Two 4-bit weights in each byte, taken apart in every forward."""

import torch


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    low = packed & 0xF  # LOSES: dequantised-each-call
    high = packed >> 4  # LOSES: dequantised-each-call
    values = torch.stack([low, high], dim=-1).flatten(-2)
    return (values.float() - 8) * scale


def main() -> None:
    packed = torch.randint(0, 255, (128, 64), dtype=torch.uint8)
    scale = torch.rand(128, 1)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(4, 128)
            x @ unpack(packed, scale).T


main()
