"""Windows of an image: the copy is the work."""

import torch


def main() -> None:
    weight = torch.randn(48, 48)
    with torch.inference_mode():
        for _ in range(3):
            image = torch.randn(2, 16, 4, 16, 4, 3)
            patches = image.permute(0, 1, 3, 2, 4, 5).contiguous().view(2, 256, 48)
            patches @ weight


main()
