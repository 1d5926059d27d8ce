"""Ten layers that read one encoding, each with weights of its own."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Layer(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = torch.nn.Linear(hidden, hidden)
        self.key = torch.nn.Linear(hidden, hidden)
        self.value = torch.nn.Linear(hidden, hidden)
        self.out = torch.nn.Linear(hidden, hidden)
        self.up = torch.nn.Linear(hidden, 2 * hidden)
        self.down = torch.nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(encoded), self.value(encoded)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    layers = torch.nn.ModuleList(Layer(64) for _ in range(10)).eval()
    with torch.inference_mode():
        for _ in range(3):
            x, encoded = torch.randn(2, 16, 64), torch.randn(2, 24, 64)
            for layer in layers:
                x = layer(x, encoded)


main()
