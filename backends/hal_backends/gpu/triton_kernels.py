"""Triton kernels of this project, for every platform that has a Triton back end.

Declared for each op, so that a plan says which kernel is missing. A kernel's module is
`hal_kernels.<folder>.triton`, and its `bind(request, device, **static)` returns the kernel; until
the module exists, the candidate is rejected as MISSING. Where a dtype has no matrix instruction,
the compiler widens the operands without an error, so the native and the widened form are two
candidates, and the widened one says on which unit it computes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from hal.candidates import Bind, Kernel, KernelCandidate, KernelUse, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.formats import FORMATS
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal_backends.gpu.build_failures import check_compiled, naming_failures
from hal_backends.gpu.formats import matrix_feature, multiplies_quantised, wide_unit
from hal_backends.gpu.limits import any_feature, feature, gather, missing_kernel, scope
from hal_backends.gpu.offers import Offer, on_device, work_of
from hal_backends.gpu.semantics import ACTIVATIONS_NOT_ROUNDED
from hal_kernels.aot.leaves import kernel_functions, matrix_instructions
from hal_kernels.aot.measured import untuned
from hal_kernels.index_selection.pieces import workspace_bytes
from hal_kernels.tuning.uses import kernel_uses

_DTYPES = ("bfloat16", "float16", "float32")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz")

# Op -> package of hal_kernels. One package may hold several ops' kernels.
FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "attention",
        "attention_projection": "attention_projection",
        "mla_attention": "mla_attention",
        "compressed_attention": "compressed_attention",
        "block_sparse_attention": "block_sparse_attention",
        "nsa_attention": "nsa_attention",
        "nsa_compress": "nsa_compress",
        "index_logits": "index_logits",
        "index_selection": "index_selection",
        "index_top_k": "index_top_k",
        "kv_compressor": "kv_compressor",
        "gemm": "gemm",
        "fused_gemm": "fused_gemm",
        "gemm_norm": "gemm_norm",
        "grouped_gemm": "grouped_gemm",
        "moe_router": "moe_router",
        "moe_dispatch": "moe_dispatch",
        "hyper_connection": "hyper_connection",
        "quantize": "quantize",
        "norm.rms": "norm",
        "norm_quantize": "norm_quantize",
        "layer_norm": "layer_norm",
        "rope": "rope",
        "activation.gated": "activation",
        "embedding": "embedding",
        "kv_write": "kv_write",
        "rope_kv_write": "rope_kv_write",
        "latent_kv_write": "latent_kv_write",
        "sample.top_k_top_p": "sampling",
        "engram": "engram",
    }
)
# Ops that multiply matrices: what they need of the device depends on the operands' dtype.
_MATRIX_OPS = frozenset(
    {
        "attention",
        "attention_projection",
        "mla_attention",
        "compressed_attention",
        "block_sparse_attention",
        "nsa_attention",
        "nsa_compress",
        "index_logits",
        "index_selection",
        "gemm",
        "fused_gemm",
        "gemm_norm",
        "grouped_gemm",
    }
)
# Ops whose kernels are those of other ops, one launched after the other; the first multiplies.
_MADE_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm_norm": ("fused_gemm", "norm.rms"),
        "index_selection": ("index_logits", "index_selection", "index_top_k"),
    }
)
_WEIGHT_OPS = frozenset({"gemm", "grouped_gemm"})
_INDEX_OPS = frozenset({"index_logits", "index_selection"})
_QUANTISED_OPS = _WEIGHT_OPS | _INDEX_OPS | {"fused_gemm", "gemm_norm"}


def kernel_module(op: str) -> str:
    return f"hal_kernels.{FOLDERS[op]}.triton"


@cache
def _missing(op: str) -> tuple[Reason, ...]:
    return tuple(missing_kernel(kernel_module(op)))


@cache
def op_limits(op: str) -> Callable[..., Sequence[Reason]] | None:
    """What the kernel's package says about requests; None where it says nothing."""
    name = f"hal_kernels.{FOLDERS[op]}.triton_limits"
    if importlib.util.find_spec(name) is None:
        return None
    limits: Callable[..., Sequence[Reason]] = importlib.import_module(name).not_supported_reasons
    return limits


def _unwritten(
    op: str, request: Any, device: DeviceSpec, allowed: Sequence[str] = ("native",)
) -> Sequence[Reason]:
    """What is missing: the kernel, a form of it, or machine code that bears the claim out.

    allowed: tiers of the stored evidence; the candidate's own tier follows from it.
    """
    limits = None if _missing(op) else op_limits(op)
    return _missing(op) if limits is None else limits(request, device, allowed=allowed)


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """None where no Triton back end is known for the platform, not even by hearsay."""
    if op not in FOLDERS or "triton" not in device.features | device.unverified_features:
        return ()
    if op not in _MATRIX_OPS:
        return on_device((_streaming(op, device),), op, device)
    offers = [_native(op, device)]
    if op in _QUANTISED_OPS:
        offers.append(_widened(op, device))
    if op in _WEIGHT_OPS:
        offers.append(_weight_only(op, device))
    return on_device(offers, op, device)


def _load(op: str, device: DeviceSpec, implementation: str = "triton") -> Callable[[], Bind]:
    name = f"{device.backend}.{op}.{implementation}"

    def load() -> Bind:
        check_compiled(name, device)
        module = importlib.import_module(kernel_module(op))

        def bind(request: Any, **static: Any) -> Kernel:
            kernel: Kernel = module.bind(request, device, **static)
            return naming_failures(kernel, name, request, device)

        return bind

    return load


def _uses(op: str, device: DeviceSpec) -> Callable[[Any], Sequence[KernelUse]]:
    """The kernels that a request launches, with what their code and configuration rest on."""

    def uses(request: Any) -> Sequence[KernelUse]:
        limits = None if _missing(op) else op_limits(op)
        if limits is None:
            return ()
        found = kernel_uses(op, limits, request, device)
        if op != "index_selection" or not found:
            return found
        # Of the call as a whole: its kernels share one workspace.
        return (replace(found[0], workspace_bytes=workspace_bytes(request)), *found[1:])

    return uses


def _leaf(op: str, device: DeviceSpec) -> tuple[Leaf, ...]:
    """The op's kernels and, of a product, the matrix instructions in their machine code."""
    parts = _MADE_OF.get(op, (op,))
    functions = tuple(name for part in parts for name in kernel_functions(part))
    names = tuple(dict.fromkeys(functions)) or (f"_{op.replace('.', '_')}_kernel",)
    kernel = Leaf(kind="kernel", name="|".join(names))
    triton = device.software.get("triton", "")
    found = matrix_instructions(parts[0], device.arch, triton) if op in _MATRIX_OPS else ()
    return (kernel, Leaf(kind="instruction", name="|".join(found))) if found else (kernel,)


def _streaming(op: str, device: DeviceSpec) -> Offer:
    """An op that is bound by memory: nothing of the matrix units is needed."""

    def check(r: Any) -> list[Reason]:
        return gather(
            scope("dtype", getattr(r, "dtype", "float32"), _DTYPES),
            feature(device, "triton"),
            _unwritten(op, r, device),
        )

    return Offer(
        op=op,
        implementation="triton",
        tier=Tier.NATIVE,
        summary="one pass over memory, compiled for this device by Triton",
        check=check,
        load=_load(op, device),
        leaf=_leaf(op, device),
        uses=_uses(op, device),
        requires=("triton",),
        untuned=untuned(device.arch),
        modules=(kernel_module(op),),
        is_graph_safe=True,
    )


def _common(
    op: str, device: DeviceSpec, r: Any, evidence: Sequence[str] = ("native",)
) -> list[Reason]:
    allowed = (*_DTYPES, *_FLOAT8) if op in _INDEX_OPS else _DTYPES
    return gather(
        scope("dtype", r.dtype, allowed),
        feature(device, "triton"),
        _unwritten(op, r, device, evidence),
    )


def _native(op: str, device: DeviceSpec) -> Offer:
    def check(r: Any) -> list[Reason]:
        needed = matrix_feature(r, device)
        return gather(_common(op, device, r), feature(device, needed) if needed else ())

    return Offer(
        op=op,
        implementation="triton",
        tier=Tier.NATIVE,
        summary="on the matrix unit of the operands' own dtype, compiled by Triton",
        check=check,
        load=_load(op, device),
        leaf=_leaf(op, device),
        uses=_uses(op, device),
        requires=("triton",),
        untuned=untuned(device.arch),
        modules=(kernel_module(op),),
        is_graph_safe=True,
    )


def _widened(op: str, device: DeviceSpec) -> Offer:
    def check(r: Any) -> list[Reason]:
        meant = scope("quantised operands", multiplies_quantised(r), (True,))
        if meant:  # what widens nothing says nothing of ranges of tokens either
            return meant
        return gather(
            _common(op, device, r, ("emulated",)),
            any_feature(device, "matrix.bfloat16", "matrix.float16"),
        )

    def work(r: Any, tokens: int) -> Work:
        return work_of(r, tokens, unit=wide_unit(device))

    return Offer(
        op=op,
        implementation="triton_widened",
        tier=Tier.TUNED,
        summary="quantised operands widened in registers to the 16-bit matrix unit, exactly",
        check=check,
        load=_load(op, device, "triton_widened"),
        leaf=_leaf(op, device),
        uses=_uses(op, device),
        work=work,
        requires=("triton",),
        untuned=untuned(device.arch),
        modules=(kernel_module(op),),
        is_graph_safe=True,
    )


def _unwritten_weight_only(op: str, r: Any, device: DeviceSpec) -> tuple[Reason, ...]:
    """What there is not yet for a format of two quantised operands whose activations stay wide:
    a kernel, or its binding where it multiplies the same weight of the float format."""
    form = r.weight_format
    stored = FORMATS.get(form.name.rpartition("_a")[0])
    limits = importlib.import_module(f"hal_kernels.{FOLDERS[op]}.triton_limits")
    choice = stored and limits.choose_kernel(replace(r, weight_format=stored), device)
    if choice and not isinstance(choice, Reason):
        found = f"{choice.kernel} takes formats with float activations only; not bound to others"
    else:
        found = f"not written yet: {op} has no kernel that leaves them so for these weights"
    required = f"a kernel for weights of {form.name} with the activations as they are"
    return (Reason(what="kernel", required=required, found=found, kind=ReasonKind.MISSING),)


def _weight_only(op: str, device: DeviceSpec) -> Offer:
    def check(r: Any) -> list[Reason]:
        return gather(
            scope("quantised operands", multiplies_quantised(r), (True,)),
            scope("dtype", r.dtype, _DTYPES),
            feature(device, "triton"),
            _missing(op) or _unwritten_weight_only(op, r, device),
            any_feature(device, "matrix.bfloat16", "matrix.float16"),
        )

    def work(r: Any, tokens: int) -> Work:
        return work_of(r, tokens, unit=wide_unit(device))

    return Offer(
        op=op,
        implementation="triton_weight_only",
        tier=Tier.TUNED,
        summary="only the weight is quantised: widened in registers, activations as they are",
        check=check,
        load=_load(op, device, "triton_weight_only"),
        leaf=_leaf(op, device),
        notes=lambda r: (ACTIVATIONS_NOT_ROUNDED,),
        work=work,
        requires=("triton",),
        untuned=untuned(device.arch),
        modules=(kernel_module(op),),
        is_graph_safe=True,
    )
