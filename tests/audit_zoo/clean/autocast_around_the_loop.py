"""autocast entered once: converted weights are kept until it ends."""

import torch


def main() -> None:
    model = torch.nn.Linear(128, 128)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            model(torch.randn(8, 128))


main()
