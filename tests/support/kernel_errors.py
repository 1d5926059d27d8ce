"""How far a kernel's result may be from the exact one: what its op says, read in one way."""

from __future__ import annotations

import torch

from hal.ops import CATALOGUE


def assert_exact(
    op: str, found: torch.Tensor, exact: torch.Tensor, *, times: float = 1.0, floor: float = 0.0
) -> None:
    """`found`, of a kernel, against `exact` in float64, each row (last dimension) by its largest
    exact value, within the `largest_errors` of the op for the dtype of `found`.

    times: of that error, where a test's operands are rounded more often. floor: of the error of a
    row whose sums cancel. A result is always allowed a step of the smallest numbers of its dtype.
    """
    assert found.shape == exact.shape, f"{list(found.shape)}, exact {list(exact.shape)}"
    assert found.isfinite().all(), "not finite"
    if not found.numel():
        return
    dtype = str(found.dtype).removeprefix("torch.")
    kind = torch.finfo(found.dtype)
    share = times * CATALOGUE[op].largest_errors[dtype]
    peak = exact.double().abs().amax(dim=-1, keepdim=True)
    allowed = share * peak + floor + kind.smallest_normal * kind.eps
    error = (found.double() - exact.double()).abs()
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), (
        f"{op}, {dtype}: error {float(error.flatten()[worst]):.3g}, allowed "
        f"{float(allowed.expand_as(error).flatten()[worst]):.3g} at {worst} of {list(found.shape)}"
    )
