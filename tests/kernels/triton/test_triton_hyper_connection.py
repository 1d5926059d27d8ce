"""Triton hyper-connections in the interpreter against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.hyper_connection.triton as triton_connection
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.hyper_connection import HyperConnectionRequest, reference
from hal_kernels.aot.catalogue import CATALOGUE as KERNELS
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import find_target
from hal_kernels.hyper_connection.triton_limits import not_supported_reasons

STEP = CATALOGUE["hyper_connection"].largest_errors
EPS = {"norm_eps": 1e-6, "eps": 1e-6}


def request_of(
    kind: Any, n: int, hidden: int, dtype: str, *, iterations: int = 20, **fields: Any
) -> HyperConnectionRequest:
    return HyperConnectionRequest(
        kind=kind, num_streams=n, hidden_size=hidden, dtype=dtype,
        sinkhorn_iterations=iterations, **fields,
    )  # fmt: skip


def static_of(request: HyperConnectionRequest) -> dict[str, torch.Tensor]:
    mixes, columns = request.num_mixes, request.num_streams * request.hidden_size
    return {
        "projection": torch.randn(mixes, columns) / columns**0.5,
        "base": torch.randn(mixes),
        "scale": torch.rand(1 if request.kind == "head" else 3) + 0.5,
    }


def assert_close(found: torch.Tensor, exact: torch.Tensor, step: float, size: float = 1.0) -> None:
    """Within a rounding to the result's dtype and what float32 sums of terms of `size` lose."""
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= step * exact.abs() + 3e-6 * size).all()


@pytest.mark.parametrize(
    ("n", "hidden", "dtype"),
    [(4, 80, "bfloat16"), (4, 24, "float16"), (4, 24, "float32"), (2, 1100, "bfloat16"),
     (1, 20, "float32"), (8, 48, "bfloat16")],
)  # fmt: skip
def test_pre(n: int, hidden: int, dtype: str) -> None:
    iterations = 20 if n == 4 and dtype == "bfloat16" else 3
    plain, lagged = (
        request_of("pre", n, hidden, dtype, iterations=iterations, is_lagged=is_lagged)
        for is_lagged in (False, True)
    )
    static = static_of(plain)
    kernel = triton_connection.bind(plain, gpu("sm_90"), **static, **EPS)
    lagged_kernel = triton_connection.bind(lagged, gpu("sm_90"), **static, **EPS)
    for tokens in (0, 3):
        wide = torch.randn(tokens, n * hidden + 16) * torch.logspace(-2, 2, 3)[:tokens, None]
        streams = wide.to(getattr(torch, dtype))[:, : n * hidden].unflatten(1, (n, hidden))
        size = float(streams.double().abs().max()) if tokens else 0.0
        exact = reference(plain, **static, **EPS)(streams.double())
        found = kernel(streams)
        assert_close(found[0], exact[0], STEP[dtype], size * n)
        for got, want in zip(found[1:], exact[1:], strict=True):
            assert got.dtype == torch.float32
            assert_close(got, want, 1e-5)
        if n != 4:
            continue
        previous = torch.rand(tokens, n)
        for given in (previous, None):
            wanted = None if given is None else given.double()
            exact = reference(lagged, **static, **EPS)(streams.double(), wanted)
            found = lagged_kernel(streams, given)
            assert_close(found[0], exact[0], STEP[dtype], size * n)
            for got, want in zip(found[1:], exact[1:], strict=True):
                assert_close(got, want, 1e-5)


def test_a_token_is_the_same_whatever_is_beside_it() -> None:
    request = request_of("pre", 4, 64, "bfloat16", iterations=2)
    kernel = triton_connection.bind(request, gpu("sm_90"), **static_of(request), **EPS)
    streams = torch.randn(17, 4, 64).bfloat16()  # more than one program takes
    for alone, together in zip(kernel(streams[5:6]), kernel(streams), strict=True):
        assert torch.equal(alone[0], together[5])


def test_mixing_matrix_is_doubly_stochastic() -> None:
    request = request_of("pre", 4, 64, "bfloat16")
    kernel = triton_connection.bind(request, gpu("sm_90"), **static_of(request), **EPS)
    comb = kernel(torch.randn(3, 4, 64).bfloat16())[2]
    assert (comb > 0).all()
    assert torch.allclose(comb.sum(dim=1), torch.ones(3, 4), atol=1e-4)  # columns are last


@pytest.mark.parametrize(
    ("n", "hidden", "dtype"),
    [(4, 80, "bfloat16"), (2, 1100, "float16"), (8, 48, "float32"), (1, 600, "bfloat16")],
)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_post_and_head(n: int, hidden: int, dtype: str, arch: str) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    post, head, last = (
        request_of(kind, n, hidden, dtype, is_lagged=is_lagged)
        for kind, is_lagged in (("post", False), ("head", False), ("head", True))
    )
    static = static_of(head)
    for tokens in (0, 2):
        streams = torch.randn(tokens, n, hidden).to(torch_dtype)
        y = torch.randn(tokens, hidden + 8).to(torch_dtype)[:, :hidden]
        gates, comb = torch.rand(tokens, n) * 2, torch.rand(tokens, n, n)
        exact = reference(post)(y.double(), streams.double(), gates.double(), comb.double())
        found = triton_connection.bind(post, gpu(arch))(y, streams, gates, comb)
        assert_close(found, exact, STEP[dtype], 4.0 * n)
        exact = reference(head, **static, **EPS)(streams.double())
        found = triton_connection.bind(head, gpu(arch), **static, **EPS)(streams)
        assert_close(found, exact, STEP[dtype], 4.0 * n)
        exact = reference(last)(streams.double(), gates.double())
        found = triton_connection.bind(last, gpu(arch))(streams, gates)
        assert_close(found, exact, STEP[dtype], 4.0 * n)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("streams_of_token", [4, 8])
def test_what_is_compiled_is_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: str, streams_of_token: int
) -> None:
    n = f"n{streams_of_token}"
    found: dict[str, dict[str, Any]] = {}
    for name in ("mixes", "collapse", "expand"):
        monkeypatch.setattr(
            triton_connection, f"_hyper_connection_{name}_kernel", Recorder(name, found)
        )
    pre, post = (request_of(kind, streams_of_token, 5120, dtype) for kind in ("pre", "post"))
    streams = torch.ones(1, streams_of_token, 5120).to(getattr(torch, dtype))
    triton_connection.bind(pre, gpu(arch), **static_of(pre), **EPS)(streams)
    gates = torch.ones(1, streams_of_token), torch.ones(1, streams_of_token, streams_of_token)
    triton_connection.bind(post, gpu(arch))(streams[:, 0], streams, *gates)
    for name, config in (("mixes", f"{n}-{dtype}"), ("collapse", n), ("expand", n)):
        claimed = "bfloat16" if name == "mixes" else dtype
        variants = KERNELS[f"hyper_connection.{name}"].variants(find_target(arch))
        variant = next(v for v in variants if (v.dtype, v.config) == (claimed, config))
        launched = {"num_warps": 4} | found[name]
        assert launched == dict(variant.constants) | {"num_warps": variant.num_warps}


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_projection_of_a_head_is_judged_by_its_tile(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: str, n: int
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name in ("mixes", "collapse"):
        monkeypatch.setattr(
            triton_connection, f"_hyper_connection_{name}_kernel", Recorder(name, found)
        )
    head = request_of("head", n, 5120, dtype)
    streams = torch.ones(1, n, 5120).to(getattr(torch, dtype))
    triton_connection.bind(head, gpu(arch), **static_of(head), **EPS)(streams)
    judged = {q.kernel: q for q in evidence_asked(not_supported_reasons, head, gpu(arch))}
    for name in ("mixes", "collapse"):
        query = judged[f"hyper_connection.{name}"]
        variants = KERNELS[query.kernel].variants(find_target(arch))
        variant = next(v for v in variants if (v.dtype, v.config) == (query.dtype, query.config))
        launched = {"num_warps": 4} | found[name]
        assert launched.pop("num_warps") == variant.num_warps
        for constant, value in variant.constants.items():
            if constant in ("N", "W", "BLOCK_W"):  # fewer need less
                assert launched[constant] <= value
            elif constant != "ITERATIONS":
                assert launched[constant] == value, constant


class Recorder:
    """Takes a kernel's place: keeps a launch's constants, and computes nothing."""

    def __init__(self, name: str, found: dict[str, dict[str, Any]]) -> None:
        self._name, self._found = name, found

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **constants: self._found.__setitem__(self._name, constants)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx1100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_up_to_eight_streams_are_served(arch: str, dtype: str) -> None:
    for kind, n in (("pre", 4), ("pre", 8), ("post", 8), ("head", 8)):
        assert not not_supported_reasons(request_of(kind, n, 5120, dtype), gpu(arch))


def test_what_is_refused() -> None:
    three = not_supported_reasons(request_of("pre", 3, 64, "bfloat16"), gpu("sm_90"))
    assert [reason.what for reason in three] == ["hyper_connection: num_streams"]
    with pytest.raises(ValueError, match="required projection, base and scale"):
        triton_connection.bind(request_of("pre", 4, 64, "bfloat16"), gpu("sm_90"))
