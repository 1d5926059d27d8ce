"""oneDNN switched off around the model."""

import torch


def main() -> None:
    model = torch.nn.Conv2d(3, 8, 3).eval()
    # LOSES: library-disabled
    with torch.backends.mkldnn.flags(enabled=False), torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 3, 16, 16))


main()
