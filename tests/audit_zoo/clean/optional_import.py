"""An optional module of the program that is no kernel library."""

import torch

try:
    import a_progress_bar_that_nobody_installed as progress
except ImportError:
    progress = None


def main() -> None:
    weight = torch.randn(64, 64)
    with torch.inference_mode():
        for _ in range(3):
            torch.randn(8, 64) @ weight


main()
