"""A backend that runs the graph as Python, named while something was debugged."""
# RUN: compiled

import torch


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) + x


def main() -> None:
    compiled = torch.compile(step, backend="eager")  # LOSES: eager-instead-of-compiled
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            compiled(torch.randn(8, 64), weight)


main()
