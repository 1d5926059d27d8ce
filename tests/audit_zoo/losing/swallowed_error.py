"""The fast product raises, and a broad except takes the slow one."""

import torch


def quantised_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    try:
        return torch._int_mm(x, weight)  # LOSES: swallowed-error
    except RuntimeError:
        return (x.float() @ weight.float()).to(torch.int32)


def main() -> None:
    with torch.inference_mode():
        x = torch.randint(-8, 8, (4, 16, 16), dtype=torch.int8)
        quantised_product(x, torch.randint(-8, 8, (16, 16), dtype=torch.int8))


main()
