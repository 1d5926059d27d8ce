"""halstack refuses a waiver, and an outer except goes on without one."""
# RUN: command

import torch

from hal.errors import HalError
from hal.waivers import parse_waivers


def load_waivers() -> object:
    try:
        # LOSES: swallowed-refusal
        return parse_waivers("[[waiver]]\nop = 'attention'\n", "waivers.toml")
    except HalError:
        return None


def main() -> None:
    load_waivers()
    with torch.inference_mode():
        torch.randn(8, 64) @ torch.randn(64, 64)


main()
