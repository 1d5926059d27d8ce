"""A compiled function in one graph."""
# RUN: compiled

import torch


@torch.compile(fullgraph=True)
def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) * 0.5 + x


def main() -> None:
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            step(torch.randn(64, 64), weight)


main()
