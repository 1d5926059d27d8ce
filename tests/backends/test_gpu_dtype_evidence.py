"""What limits admit in a dtype rests on machine code of that dtype, in the form that is launched.

Over every op with kernels of this project, every architecture and the calls of the support matrix,
each in every dtype of activations: whatever kernel comes next is judged here too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import pytest

import hal_kernels.collective.triton_limits as collective_limits
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.errors import HalError
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.formats import FORMATS
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, TokenRange
from hal.reasons import Reason
from hal_backends.gpu.triton_kernels import FOLDERS, op_limits
from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.limits import EvidenceQuery, evidence_asked
from hal_kernels.aot.targets import TARGETS, Target
from hal_kernels.aot.variant import KernelVariant
from hal_kernels.collective.layout import Algorithm

Limits = Callable[[Any, DeviceSpec], Sequence[Reason]]
Requests = Mapping[str, Mapping[str, OpRequest]]
SIXTEEN_BITS = ("bfloat16", "float16")


def collectives() -> Iterator[tuple[str, OpRequest, Limits]]:
    given: dict[str, Any] = {
        "world_size": 8, "width": 4096, "dtype": "bfloat16", "tokens": TokenRange(1, 8),
    }  # fmt: skip
    kinds = {"one_shot": "all_reduce", "two_shot": "all_reduce"}
    for algorithm in get_args(Algorithm):
        request = CollectiveRequest(kind=kinds.get(algorithm, algorithm), **given)
        limits = functools.partial(collective_limits.not_supported_reasons, algorithm=algorithm)
        yield f"collective {algorithm}", request, limits
    norm = AllReduceNormRequest(kind="all_reduce", **given)
    yield "all_reduce_norm", norm, collective_limits.norm_not_supported_reasons


def calls(requests: Requests) -> Iterator[tuple[str, OpRequest, Limits]]:
    for op in FOLDERS:
        limits = op_limits(op)
        if limits is None:
            continue
        for name, request in requests[op].items():
            yield f"{op} {name}", request, limits
    yield from collectives()


def in_dtypes(request: OpRequest) -> Iterator[OpRequest]:
    """The request in every dtype of activations that it may have."""
    if not hasattr(request, "dtype"):
        return
    for dtype in ACTIVATION_DTYPES:
        fields: dict[str, Any] = {"dtype": dtype}
        if getattr(request, "kv_dtype", "") == request.dtype:
            fields["kv_dtype"] = dtype
        form = getattr(request, "weight_format", None)
        if form is not None and form.is_dense:
            fields["weight_format"] = FORMATS[dtype]
        try:
            yield dataclasses.replace(request, **fields)
        except HalError:
            continue


def variants_of(query: EvidenceQuery, target: Target) -> list[KernelVariant]:
    """Those that a query's answer may be of."""
    return [
        variant
        for variant in CATALOGUE[query.kernel].variants(target)
        if variant.dtype == query.dtype and query.config in ("", variant.config)
    ]


def widths_of_activations(kernel: str, target: Target) -> set[str]:
    """Arguments that are of the activations' dtype: 16 bits wide in some variant."""
    return {
        name
        for variant in CATALOGUE[kernel].variants(target)
        for name, dtype in variant.pointers.items()
        if dtype in SIXTEEN_BITS
    }


def of_another_dtype(
    limits: Limits, request: Any, target: Target, device: DeviceSpec
) -> Iterator[str]:
    """The kernels of a request that no variant was compiled of in its dtype."""
    for query in evidence_asked(limits, request, device):
        names = widths_of_activations(query.kernel, target)
        found = variants_of(query, target)
        wanted = str(request.dtype).replace("float8", "fp8")
        if not names or any(wanted in (v.pointers.get(n) for n in names) for v in found):
            continue
        yield f"{query.kernel} {query.dtype or '-'} {query.config or 'any'}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_what_a_limit_admits_was_compiled_in_its_dtype(requests: Requests, target: Target) -> None:
    device = gpu(target.arch)
    wrong, admitted = [], 0
    for name, request, limits in calls(requests):
        for changed in in_dtypes(request):
            if limits(changed, device):
                continue
            admitted += 1
            wrong += [
                f"{name} in {changed.dtype}: {found}"  # type: ignore[attr-defined]
                for found in of_another_dtype(limits, changed, target, device)
            ]
    assert admitted > 60
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def without_a_form(
    limits: Limits, request: Any, target: Target, device: DeviceSpec
) -> Iterator[str]:
    """The kernels of a request that have several forms of the dtype, none of which is named."""
    for query in evidence_asked(limits, request, device):
        if not query.config and len(variants_of(query, target)) > 1:
            yield f"{query.kernel} {query.dtype or '-'}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_a_limit_names_the_form_that_is_launched(requests: Requests, target: Target) -> None:
    """One that names none is judged by the worst form of the dtype, and says so of all."""
    device = gpu(target.arch)
    unnamed = [
        f"{name}: {found}"
        for name, request, limits in calls(requests)
        for changed in (request, *in_dtypes(request))
        for found in without_a_form(limits, changed, target, device)
    ]
    assert not unnamed, "\n".join(dict.fromkeys(unnamed))


def test_a_limit_that_names_no_form_is_found() -> None:
    from hal_kernels.aot.limits import evidence_reasons

    def limits(request: Any, device: DeviceSpec) -> Sequence[Reason]:
        return evidence_reasons("norm.rms", device, dtype="bfloat16")

    request = RmsNormRequest(hidden_size=64, dtype="bfloat16")
    target = next(t for t in TARGETS if t.arch == "sm_90")
    assert list(without_a_form(limits, request, target, gpu("sm_90"))) == ["norm.rms bfloat16"]


def test_a_limit_that_asks_for_another_dtype_is_found() -> None:
    """A norm in float16 that is judged by the code of bfloat16."""
    from hal_kernels.aot.limits import evidence_reasons

    def limits(request: Any, device: DeviceSpec) -> Sequence[Reason]:
        return evidence_reasons("norm.rms", device, dtype="bfloat16")

    request = RmsNormRequest(hidden_size=64, dtype="float16")
    target = next(t for t in TARGETS if t.arch == "sm_90")
    (found,) = of_another_dtype(limits, request, target, gpu("sm_90"))
    assert found == "norm.rms bfloat16 any"
    right = dataclasses.replace(request, dtype="bfloat16")
    assert not list(of_another_dtype(limits, right, target, gpu("sm_90")))
