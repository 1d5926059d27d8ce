"""A decoding loop that appends token ids and reads one of them a step."""

import torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def main() -> None:
    model = Model().eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        for _ in range(8):
            token = model(ids[:, -1:]).argmax(-1)
            ids = torch.cat([ids, token], dim=1)
            if token.item() == 101:
                break


main()
