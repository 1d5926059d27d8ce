"""autocast entered anew for each batch: all weights are converted each time."""

import torch


def main() -> None:
    model = torch.nn.Linear(128, 128)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(8, 128)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(x)  # LOSES: cast-each-call


main()
