"""int8 weights turned into floats when the model is loaded."""

import torch


def main() -> None:
    stored = torch.randint(-127, 127, (128, 128), dtype=torch.int8)
    weight = stored.float() * torch.rand(128, 1)
    with torch.inference_mode():
        for _ in range(4):
            torch.nn.functional.linear(torch.randn(4, 128), weight)


main()
