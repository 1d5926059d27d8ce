"""A variable that keeps torch from the CPU's instructions."""
# RUN: command ATEN_CPU_CAPABILITY=default
# LOSES-ANYWHERE: environment-override

import torch


def main() -> None:
    model = torch.nn.Linear(64, 64).eval()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(8, 64))


main()
