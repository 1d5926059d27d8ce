"""Which kernel `scaled_dot_product_attention` ended in, and what excludes each fused one.

The constraints are those of torch's own selection (aten/src/ATen/native/transformers/
sdp_utils_cpp.h and cuda/sdp_utils.cpp, torch 2.13); a test compares the CPU's with what torch
answers. A constraint that torch's versions differ in is kept apart, as `doubtful`: it is named only
where nothing else explains what was seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hal.auditing.document import Evidence
from hal.auditing.rules.facts import FLOAT_BITS
from hal.auditing.trace import FunctionCall, TensorFact

Backend = Literal["flash", "efficient", "cudnn", "fused", "math", "unknown"]

FUSED_BY_DEVICE: Final[Mapping[str, tuple[Backend, ...]]] = {
    "cpu": ("flash",),
    "cuda": ("flash", "efficient", "cudnn"),
}
"""The fused kernels that torch selects among, by device type. Others bring their own."""

_LEAF_WORDS: Final[tuple[tuple[str, Backend], ...]] = (
    ("flash_attention", "flash"),
    ("efficient_attention", "efficient"),
    ("cudnn_attention", "cudnn"),
    ("fused_attention", "fused"),
)
_MATH_WORDS = ("attention_math", "bmm", "softmax", "matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArguments:
    """What decides: the tensors [batch, heads, length, head_dim], flags, torch's settings."""

    query: TensorFact
    key: TensorFact
    value: TensorFact
    mask: TensorFact | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    arch: str = ""

    @property
    def needs_gradient(self) -> bool:
        off = self.settings.get("grad_enabled") == "False" or "inference_mode" in self.settings
        return not off and any(f.requires_grad for f in (self.query, self.key, self.value))

    @property
    def sm(self) -> int | None:
        """Compute capability as a number: 90 of "sm_90a"; None where the arch is not NVIDIA's."""
        found = re.fullmatch(r"sm_?(\d+)[a-z]?", self.arch)
        return int(found[1]) if found else None


@dataclass(slots=True)
class Exclusions:
    """Why a backend cannot take a call. doubtful: depends on the version of torch."""

    sure: list[Evidence] = field(default_factory=list)
    doubtful: list[Evidence] = field(default_factory=list)


def backend_of(leaves: Iterable[str]) -> Backend:
    """The backend that ran, from the dispatcher ops seen inside a call."""
    names = list(leaves)
    for word, backend in _LEAF_WORDS:
        if any(word in name for name in names):
            return backend
    is_math = any(word in name for name in names for word in _MATH_WORDS)
    return "math" if is_math else "unknown"


def arguments_of(call: FunctionCall, arch: str) -> AttentionArguments | None:
    """The arguments of an observed call; None if its tensors were not seen."""
    values: Mapping[str, Any] = call.arguments
    query, key, value = values.get("query"), values.get("key"), values.get("value")
    if not all(isinstance(fact, TensorFact) for fact in (query, key, value)):
        return None
    mask = values.get("attn_mask")
    dropout = values.get("dropout_p", 0.0)
    return AttentionArguments(
        query=query,  # type: ignore[arg-type]  # checked above, in a loop
        key=key,  # type: ignore[arg-type]
        value=value,  # type: ignore[arg-type]
        mask=mask if isinstance(mask, TensorFact) else None,
        dropout_p=float(dropout) if isinstance(dropout, int | float) else 0.0,
        is_causal=bool(values.get("is_causal", False)),
        enable_gqa=bool(values.get("enable_gqa", False)),
        settings=call.settings,
        arch=arch,
    )


def exclusions(backend: Backend, call: AttentionArguments) -> Exclusions:
    """Everything that excludes a fused backend, not only what torch tests first."""
    found = Exclusions()
    sure = found.sure
    device = call.query.device
    _check_setting(backend, call, sure)
    _check_shapes(backend, call, sure)
    if any(f.is_nested for f in (call.query, call.key, call.value)) and device == "cpu":
        sure.append(_why(backend, "layout", "dense tensors", "nested tensors"))
    if device == "cpu" and call.dropout_p > 0.0:
        sure.append(_why(backend, "dropout_p", "0", call.dropout_p))
    _check_mask(backend, call, sure)
    _check_dtype(backend, call, sure)
    if device == "cuda":
        _check_cuda(backend, call, found)
    return found


def _check_setting(backend: Backend, call: AttentionArguments, sure: list[Evidence]) -> None:
    key = {"flash": "flash_sdp", "efficient": "mem_efficient_sdp", "cudnn": "cudnn_sdp"}
    if backend in key and call.settings.get(key[backend]) == "False":
        sure.append(_why(backend, "torch setting", f"{key[backend]} enabled", "disabled"))


def _check_shapes(backend: Backend, call: AttentionArguments, sure: list[Evidence]) -> None:
    shapes = [fact.shape for fact in (call.query, call.key, call.value)]
    found = " ".join(str(list(shape)) for shape in shapes)
    if any(len(shape) != 4 for shape in shapes):
        sure.append(_why(backend, "dimensions of q, k, v", "4 each", found))
        return
    (q_batch, q_heads, q_length, q_dim), (k_batch, k_heads, k_length, k_dim), value = shapes
    v_batch, v_heads, _, v_dim = value
    if not q_batch == k_batch == v_batch:
        sure.append(_why(backend, "batch of q, k, v", "equal", f"{q_batch}, {k_batch}, {v_batch}"))
    heads = f"{q_heads}, {k_heads}, {v_heads}"
    if call.enable_gqa:
        if k_heads != v_heads or q_heads % max(1, k_heads):
            sure.append(_why(backend, "heads of q, k, v", "k = v, dividing q", heads))
    elif not q_heads == k_heads == v_heads:
        sure.append(_why(backend, "heads of q, k, v", "equal, or enable_gqa=True", heads))
    needs_equal_value = backend == "flash"
    if q_dim != k_dim or (needs_equal_value and q_dim != v_dim):
        dims = f"{q_dim}, {k_dim}, {v_dim}"
        sure.append(_why(backend, "head_dim of q, k, v", "equal", dims))
    if not q_length or not k_length:
        sure.append(_why(backend, "length of q and k", "≥ 1", f"{q_length}, {k_length}"))
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    for name, fact in tensors.items():
        if fact.last_stride != 1 and not (fact.shape[-1] == 1 and call.query.device != "cpu"):
            what = f"stride of {name}'s last dimension"
            sure.append(_why(backend, what, "1", fact.last_stride))


def _check_mask(backend: Backend, call: AttentionArguments, sure: list[Evidence]) -> None:
    mask = call.mask
    if mask is None:
        return
    if backend == "flash" and call.query.device == "cuda":
        sure.append(_why(backend, "attn_mask", "None", _mask_text(mask)))
        return
    if mask.last_stride != 1 and call.query.device == "cuda":
        sure.append(_why(backend, "stride of attn_mask's last dimension", "1", mask.last_stride))
    if mask.requires_grad and (backend == "cudnn" or call.query.device == "cpu"):
        sure.append(_why(backend, "attn_mask.requires_grad", "False", "True"))
    if len(call.query.shape) == 4 and not _mask_fits(mask.shape, call):
        batch, heads, length, _ = call.query.shape
        required = f"2 dimensions [{length} or 1, {call.key.shape[-2]} or 1], or 4 with"
        required += f" [{batch} or 1, {heads} or 1] before them"
        sure.append(_why(backend, "shape of attn_mask", required, list(mask.shape)))


def _mask_fits(shape: tuple[int, ...], call: AttentionArguments) -> bool:
    wanted = (*call.query.shape[:3], call.key.shape[-2])
    if len(shape) not in (2, 4):
        return False
    return all(have in (1, want) for have, want in zip(reversed(shape), reversed(wanted)))  # noqa: B905 - a mask may have fewer


def _mask_text(mask: TensorFact) -> str:
    pattern = f", {mask.pattern}" if mask.pattern else ""
    return f"{mask.dtype}{list(mask.shape)}{pattern}"


def _check_dtype(backend: Backend, call: AttentionArguments, sure: list[Evidence]) -> None:
    if call.query.device == "cpu":
        allowed = tuple(FLOAT_BITS)
    elif backend == "efficient":
        allowed = ("float16", "bfloat16", "float32")
    else:
        allowed = ("float16", "bfloat16")
    if call.sm is not None and call.sm < 80:
        allowed = tuple(dtype for dtype in allowed if dtype != "bfloat16")
    dtypes = (call.query.dtype, call.key.dtype, call.value.dtype)
    if len(set(dtypes)) > 1 or dtypes[0] not in allowed:
        required = f"the same one of {', '.join(sorted(allowed))}"
        sure.append(_why(backend, "dtype of q, k, v", required, ", ".join(dtypes)))


def _check_cuda(backend: Backend, call: AttentionArguments, found: Exclusions) -> None:
    q_dim, v_dim = call.query.shape[-1], call.value.shape[-1]
    lowest = 50 if backend == "efficient" else 80
    if call.sm is not None and not lowest <= call.sm <= 121:
        found.sure.append(_why(backend, "compute capability", f"sm_{lowest} to sm_121", call.arch))
    if backend == "flash":
        _check_cuda_flash(call, found)
    elif backend == "efficient":
        step = 8 if FLOAT_BITS.get(call.query.dtype) == 16 else 4
        if q_dim % step or v_dim % step:
            required = f"a multiple of {step} for {call.query.dtype}"
            found.sure.append(_why(backend, "head_dim", required, f"{q_dim}, {v_dim}"))
        if call.enable_gqa and call.query.shape[-3] != call.key.shape[-3]:
            heads = f"{call.query.shape[-3]}, {call.key.shape[-3]}"
            required = "equal, in versions of torch without grouped heads here"
            found.doubtful.append(_why(backend, "heads of q and k", required, heads))
    elif backend == "cudnn":
        _check_cudnn(call, found)


def _check_cuda_flash(call: AttentionArguments, found: Exclusions) -> None:
    q_dim, lengths = call.query.shape[-1], (call.query.shape[-2], call.key.shape[-2])
    if q_dim > 256:
        found.sure.append(_why("flash", "head_dim", "≤ 256", q_dim))
    if call.is_causal and lengths[0] != lengths[1]:
        text = f"{lengths[0]}, {lengths[1]}"
        found.sure.append(_why("flash", "lengths of q and k with is_causal", "equal", text))
    is_small_chip = call.sm is not None and (86 <= call.sm <= 89 or call.sm in (120, 121))
    fits = q_dim <= 192 or (q_dim > 224 and call.dropout_p == 0.0)
    if call.needs_gradient and is_small_chip and not fits:
        required = "≤ 192, or > 224 without dropout, to train on this chip"
        found.sure.append(_why("flash", "head_dim", required, q_dim))


def _check_cudnn(call: AttentionArguments, found: Exclusions) -> None:
    dims = (call.query.shape[-1], call.value.shape[-1])
    text = f"{dims[0]}, {dims[1]}"
    if any(f.is_nested for f in (call.query, call.key, call.value)):
        found.sure.append(_why("cudnn", "layout", "dense tensors", "nested tensors"))
    if any(dim % 8 for dim in dims):
        found.sure.append(_why("cudnn", "head_dim", "a multiple of 8", text))
    if max(dims) > 256:
        found.sure.append(_why("cudnn", "head_dim", "≤ 256", text))
    elif max(dims) > 128:
        required = "≤ 128 (256 with a recent cuDNN on sm_90 and sm_100)"
        found.doubtful.append(_why("cudnn", "head_dim", required, text))
    if (call.dropout_p * 16) % 1:
        found.sure.append(_why("cudnn", "dropout_p", "a multiple of 1/16", call.dropout_p))
    if call.settings.get("deterministic_algorithms") == "True":
        found.sure.append(_why("cudnn", "deterministic algorithms", "off", "on"))
    if call.key.shape[-2] == 1:
        found.sure.append(_why("cudnn", "length of k", "> 1", 1))


def _why(backend: str, what: str, required: object, found: object) -> Evidence:
    return Evidence(what=f"{backend}: {what}", required=str(required), found=str(found))
