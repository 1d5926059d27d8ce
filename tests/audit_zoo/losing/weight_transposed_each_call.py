"""A weight laid out anew in every forward."""

import torch


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(128, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T.contiguous()  # LOSES: constant-copied-each-call


def main() -> None:
    model = Head().eval()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 128))


main()
