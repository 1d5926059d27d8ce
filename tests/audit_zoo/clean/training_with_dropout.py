"""Dropout and batch norm in training, then evaluation in eval mode."""

import torch


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(16, 32))


main()
