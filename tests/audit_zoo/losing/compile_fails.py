"""A backend that cannot compile, and torch told to go on without."""
# RUN: compiled

import torch
import torch._dynamo


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # LOSES: eager-instead-of-compiled
    return torch.relu(x @ weight) + x


def broken_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise RuntimeError("no code for this operation")


def main() -> None:
    compiled = torch.compile(step, backend=broken_backend)
    weight = torch.randn(64, 64)
    with torch.inference_mode(), torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(3):
            compiled(torch.randn(8, 64), weight)


main()
