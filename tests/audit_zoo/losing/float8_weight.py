"""A float8 weight, widened before every product."""

import torch


def main() -> None:
    weight = torch.randn(128, 128).to(torch.float8_e4m3fn)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(4, 128)
            torch.nn.functional.linear(x, weight.to(torch.float32))  # LOSES: dequantised-each-call


main()
