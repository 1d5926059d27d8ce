"""A float32 model narrowed once, when it is loaded."""

import torch


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)
    )
    model = model.eval().to(torch.bfloat16)
    with torch.inference_mode():
        for _ in range(4):
            model(torch.randn(8, 128, dtype=torch.bfloat16))


main()
