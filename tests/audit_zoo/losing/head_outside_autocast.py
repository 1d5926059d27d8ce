"""A model under autocast whose head was left out of the block."""

import torch


def main() -> None:
    body, head = torch.nn.Linear(64, 64).eval(), torch.nn.Linear(64, 64).eval()
    with torch.no_grad():
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = body(torch.randn(8, 64))  # LOSES: cast-each-call
            head(hidden.float())  # LOSES: outside-autocast


main()
