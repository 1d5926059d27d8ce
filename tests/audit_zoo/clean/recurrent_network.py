"""A recurrence by torch's own LSTM."""

import torch


def main() -> None:
    model = torch.nn.LSTM(32, 64, batch_first=True).eval()
    with torch.inference_mode():
        for _ in range(2):
            model(torch.randn(4, 20, 32))


main()
