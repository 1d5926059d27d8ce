"""A print in the middle of a compiled function."""
# RUN: compiled

import torch


@torch.compile(backend="aot_eager")
def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = torch.relu(x @ weight)
    print("mean", x.mean().item())  # LOSES: graph-break
    return x @ weight


def main() -> None:
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            step(torch.randn(8, 64), weight)


main()
