"""A recurrence written as a Python loop over time, a few values at a time."""

import torch


def recurrence(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(x.shape[0])
    states = []
    for step in range(x.shape[1]):
        state = state * decay + x[:, step]  # LOSES: tiny-ops
        states.append(state)
    return torch.stack(states, dim=1)


def main() -> None:
    with torch.inference_mode():
        recurrence(torch.randn(16, 150), torch.rand(16))


main()
