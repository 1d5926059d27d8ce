"""A product per head in a Python loop."""

import torch


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    heads = []
    for head in range(q.shape[0]):
        heads.append(q[head] @ k[head].T)  # LOSES: loop-of-small-products
    return torch.stack(heads)


def main() -> None:
    with torch.inference_mode():
        for _ in range(2):
            scores(torch.randn(16, 32, 16), torch.randn(16, 32, 16))


main()
