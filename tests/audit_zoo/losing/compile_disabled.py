"""A compiled function in an environment that switches the compiler off."""
# RUN: command TORCH_COMPILE_DISABLE=1
# LOSES-ANYWHERE: environment-override

import torch


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + x


def main() -> None:
    compiled = torch.compile(step)  # LOSES: eager-instead-of-compiled
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            compiled(torch.randn(8, 64), weight)


main()
