"""A bfloat16 checkpoint multiplied in bfloat16."""

import torch


def main() -> None:
    up = torch.randn(256, 128).bfloat16()
    down = torch.randn(128, 256).bfloat16()
    x = torch.randn(1, 128).bfloat16()
    with torch.inference_mode():
        for _ in range(4):
            hidden = torch.nn.functional.linear(x, up)
            x = torch.nn.functional.linear(hidden.relu(), down)
            x = x / x.norm()


main()
