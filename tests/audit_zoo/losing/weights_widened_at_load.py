"""A bfloat16 checkpoint widened to float32 when it is loaded, and decoded from row by row."""

import torch


def load_checkpoint() -> dict[str, torch.Tensor]:
    return {"up": torch.randn(256, 128).bfloat16(), "down": torch.randn(128, 256).bfloat16()}


def main() -> None:
    weights = {name: weight.float() for name, weight in load_checkpoint().items()}
    x = torch.randn(1, 128)
    with torch.inference_mode():
        for _ in range(4):
            hidden = torch.nn.functional.linear(x, weights["up"])  # LOSES: widened-product
            x = torch.nn.functional.linear(hidden.relu(), weights["down"])  # LOSES: widened-product
            x = x / x.norm()


main()
