"""An int8 weight that is turned into floats at every call."""

import torch


class Int8Linear(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (size, size), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(size, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() * self.scale  # LOSES: dequantised-each-call
        return torch.nn.functional.linear(x, weight)


def main() -> None:
    model = Int8Linear(128).eval()
    with torch.inference_mode():
        for _ in range(4):
            model(torch.randn(4, 128))


main()
