"""uint8 images normalised and classified by a convolution."""

import torch


def main() -> None:
    mean, std = torch.rand(3, 1, 1), torch.rand(3, 1, 1) + 0.5
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 10),
    ).eval()
    with torch.inference_mode():
        for _ in range(3):
            images = torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8)
            model((images.float() / 255 - mean) / std)


main()
