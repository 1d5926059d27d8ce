"""A model with dropout and batch norm in eval mode."""

import torch


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Dropout(0.2), torch.nn.ReLU()
    ).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(16, 64))


main()
