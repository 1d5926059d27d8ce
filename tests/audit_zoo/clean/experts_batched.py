"""A mixture of experts as one batched product."""

import torch


class Experts(torch.nn.Module):
    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(count, hidden, hidden))

    def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        every = torch.matmul(x[None], self.weights)  # [experts, tokens, hidden]
        return torch.einsum("eth,te->th", every, share)


def main() -> None:
    model = Experts(16, 64).eval()
    with torch.inference_mode():
        for _ in range(2):
            x = torch.randn(8, 64)
            model(x, torch.softmax(torch.randn(8, 16), dim=-1))


main()
