"""Anomaly detection left in a training loop."""

import torch


def main() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autograd.detect_anomaly(check_nan=False):  # LOSES: anomaly-mode
            model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main()
