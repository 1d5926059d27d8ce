"""A float16 weight converted to float32 in every forward."""

import torch


class Projection(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(128, 128, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype)  # LOSES: cast-each-call
        return x @ weight.T  # LOSES: widened-product


def main() -> None:
    model = Projection().eval()
    with torch.inference_mode():
        for _ in range(4):
            model(torch.randn(4, 128))


main()
