"""A name that differs at each call, until torch gives up compiling."""
# RUN: compiled

import torch


def scaled(x: torch.Tensor, name: str) -> torch.Tensor:  # LOSES: eager-instead-of-compiled
    return x * len(name) if name.startswith("layer") else x


def main() -> None:
    compiled = torch.compile(scaled, backend="aot_eager")
    with torch.inference_mode():
        for number in range(12):
            compiled(torch.randn(8, 64), f"layer {number}")


main()
