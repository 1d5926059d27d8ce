"""The spy on reading back sees each way, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from read_backs import no_reading_back


def counts() -> torch.Tensor:
    return torch.randint(1, 4, (5,))


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0]),
    "int": lambda t: int(t[0]),
    "float": lambda t: float(t[0]),
    "if": lambda t: 1 if (t > 2).any() else 0,
    "size": lambda t: t.new_empty((t[0],)),  # type: ignore[arg-type]
    "torch size": lambda t: torch.empty(t[0], 2),  # type: ignore[call-overload]
    "slice": lambda t: t[: t[0]],
    "range": lambda t: range(t[0]),  # type: ignore[call-overload]
    "arange": lambda t: torch.arange(t[0]),  # type: ignore[call-overload]
    "tolist": lambda t: t.tolist(),
    "iteration": lambda t: [int(value) for value in t],
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "to cpu by name": lambda t: t.to(device="cpu"),
    "numpy": lambda t: t.numpy(),
    "array": lambda t: np.asarray(t),
    "mask": lambda t: t[t > 1],
    "mask of a row": lambda t: t.view(1, -1)[:, t > 1],
    "mask of bytes": lambda t: torch.ops.aten.index.Tensor(t, [(t > 1).byte()]),
    "assigned rows of a mask": lambda t: t.clone().__setitem__(t > 9, t[:0]),
    "nonzero": torch.nonzero,
    "nonzero as a method": lambda t: t.nonzero(),
    "nonzero as a tuple": lambda t: torch.nonzero(t, as_tuple=True),
    "argwhere": torch.argwhere,
    "where": lambda t: torch.where(t > 1),
    "unique": torch.unique,
    "unique as a method": lambda t: t.unique(),
    "unique of a dimension": lambda t: torch.unique(t.view(1, -1), dim=0),
    "unique consecutive": torch.unique_consecutive,
    "masked_select": lambda t: torch.masked_select(t, t > 1),
    "repeat_interleave": lambda t: torch.repeat_interleave(t),
    "repeat_interleave of rows": lambda t: t.repeat_interleave(t, dim=0),
    "bincount": torch.bincount,
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t, t.clone()),
    "one_hot": torch.nn.functional.one_hot,
    "to_sparse": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_back_is_refused(read: Callable[[torch.Tensor], object]) -> None:
    t = counts()
    read(t)  # is no error of its own
    with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
        read(t)


@pytest.mark.parametrize("name", ["to", "copy_", "device"])
def test_a_copy_from_a_device_is_refused(name: str) -> None:
    """The meta device stands for any: the spy sees the call before it is made."""
    t = torch.empty(3, device="meta")
    host = torch.empty(3)
    copies: dict[str, Callable[[], object]] = {
        "to": lambda: t.to(torch.device("cpu"), torch.float16),
        "copy_": lambda: host.copy_(t),
        "device": lambda: t.to(host),
    }
    with no_reading_back():
        t.to(torch.float16).to(t.device).copy_(t)
        t.copy_(host)
    with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
        copies[name]()


def test_what_stays_on_the_device_is_not_refused() -> None:
    t = counts()
    with no_reading_back():
        rows = t.new_zeros(12, 2)
        rows[t] = 1
        rows[rows > 1] = 7  # is filled in
        rows[t] += rows[t.flip(0)]
        repeated = t.repeat_interleave(t.clamp(max=2).mul(0).add(2), dim=0, output_size=10)
        torch.where(repeated > 1, repeated, -1).cumsum(0).to(torch.int32).to(t.device)
        rows.masked_fill_(rows > 1, 0)
        assert (rows.shape, len(t), t.stride(0)) == ((12, 2), 5, 1)


@triton.jit
def _doubled(x: tl.tensor, y: tl.tensor, size: tl.constexpr) -> None:
    at = tl.arange(0, size)
    tl.store(y + at, 2 * tl.load(x + at))


def test_a_launch_reads_and_its_grid_does_not() -> None:
    x = torch.randn(8)
    y = torch.empty_like(x)
    with no_reading_back():
        _doubled[(1,)](x, y, 8)
        _doubled[lambda _: (1,)](x, y, 8)
    assert torch.equal(y, 2 * x)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
        _doubled[lambda _: (int(one),)](x, y, 8)
    with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
        _doubled[(int(one),)](x, y, 8)


def test_it_ends_with_its_block() -> None:
    t = counts()
    with pytest.raises(ZeroDivisionError), no_reading_back():
        raise ZeroDivisionError
    assert t.tolist() == [int(value) for value in t]
