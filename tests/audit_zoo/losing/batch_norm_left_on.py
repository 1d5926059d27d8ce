"""Batch statistics in inference: the prediction depends on who else is in the batch."""

import torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x)))  # LOSES: batch-norm-in-training-mode


def main() -> None:
    model = Net()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 3, 16, 16))


main()
