"""A kernel package that was built for other chips, caught and replaced."""

import sys
import types

import torch
from torch.nn.functional import scaled_dot_product_attention


def install_fast_kernels() -> types.ModuleType:
    """Stands for an installed extension whose binary lacks this device."""
    module = types.ModuleType("fast_kernels")

    @torch.library.custom_op("audit_zoo_fast_kernels::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("fast_kernels: no kernel image is available for this device")

    module.attention = attention  # type: ignore[attr-defined]
    sys.modules["fast_kernels"] = module
    return module


fast_kernels = install_fast_kernels()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    try:
        return fast_kernels.attention(q, k, v)  # LOSES: wrong-arch-package
    except RuntimeError:
        return scaled_dot_product_attention(q, k, v)


def main() -> None:
    with torch.inference_mode():
        attend(*(torch.randn(2, 4, 64, 32) for _ in range(3)))


main()
