"""Tokens that are sampled one by one in Python."""

import torch


def main() -> None:
    with torch.inference_mode():
        scores = torch.rand(200)
        best, position = -1.0, 0
        for index in range(200):
            score = scores[index].item()  # LOSES: python-values-in-the-loop
            if score > best:
                best, position = score, index
        assert position == int(scores.argmax())


main()
