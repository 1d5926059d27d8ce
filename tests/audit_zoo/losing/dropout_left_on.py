"""A model that nobody put into eval mode."""

import torch


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(self.dropout(hidden))  # LOSES: dropout-left-on


def main() -> None:
    model = Classifier()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 64))


main()
