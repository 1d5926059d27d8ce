"""int8 weights multiplied as int8."""

import torch


def main() -> None:
    weight = torch.randint(-127, 127, (128, 128), dtype=torch.int8)
    scale = torch.rand(128)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(32, 128)
            step = x.abs().amax(dim=-1, keepdim=True) / 127
            quantised = (x / step).round().to(torch.int8)
            torch._int_mm(quantised, weight) * (step * scale)


main()
