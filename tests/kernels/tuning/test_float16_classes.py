"""Every class that a plan names can be tuned, and float16 rows of a cache have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_devices import gpu
from hal.candidates import KernelUse
from hal.device import DeviceSpec
from hal.errors import UsageError
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.request import OpRequest, TokenRange
from hal_kernels.aot.targets import find_target
from hal_kernels.compressed_attention import triton_limits as compressed_limits
from hal_kernels.index_logits import triton_limits as index_limits
from hal_kernels.mla_attention import triton_limits as mla_limits
from hal_kernels.tuning.shapes import parse_shape
from hal_kernels.tuning.tunable_kernels import TUNABLE, classes_of
from hal_kernels.tuning.tune_shapes import named_classes
from hal_kernels.tuning.uses import kernel_uses

LIMITS: dict[str, Any] = {
    "compressed_attention": compressed_limits.not_supported_reasons,
    "index_logits": index_limits.not_supported_reasons,
    "mla_attention": mla_limits.not_supported_reasons,
}
PLAIN = {"bfloat16": "bf16", "float16": "fp16"}
TOKENS = TokenRange(1, 16)


def mla_request(dtype: str, kv_format: Any, **fields: Any) -> MlaAttentionRequest:
    sizes: dict[str, Any] = {"num_heads": 64, "kv_lora_rank": 512, "rope_dim": 64}
    return MlaAttentionRequest(
        **sizes, **fields, block_size=64, dtype=dtype, kv_format=kv_format, tokens=TOKENS
    )


def compressed_request(dtype: str, kv_format: Any, **fields: Any) -> CompressedAttentionRequest:
    return CompressedAttentionRequest(
        num_heads=8, head_dim=512, rope_dim=64, window=128, has_sinks=True, compress_ratio=4,
        window_format=kv_format, main_format=kv_format, block_size=64, dtype=dtype, tokens=TOKENS,
        **fields,
    )  # fmt: skip


def index_request(dtype: str, key_format: Any, phase: Any) -> IndexLogitsRequest:
    return IndexLogitsRequest(
        phase=phase, num_heads=64, head_dim=128, key_format=key_format, block_size=64,
        dtype=dtype, tokens=TOKENS,
    )  # fmt: skip


def requests_of(dtype: str) -> Iterator[OpRequest]:
    """In plain rows and, of other queries than float16, in packed ones."""
    packed = dtype != "float16"
    phases: tuple[Any, ...] = ("decode", "prefill")
    for phase in phases:
        for key_format in (PLAIN[dtype], *(("fp8_132", "fp4_68") if packed else ())):
            yield index_request(dtype, key_format, phase)
        for top_k in (0, 512):
            for kv_format in (PLAIN[dtype], *(("fp8_656",) if packed else ())):
                yield mla_request(dtype, kv_format, phase=phase, top_k=top_k)
        for top_k in (0, 512, 513):
            for kv_format in (PLAIN[dtype], *(("v4_584", "v41_528") if packed else ())):
                yield compressed_request(dtype, kv_format, phase=phase, top_k=top_k)


def attending_use(op: str, request: OpRequest, device: DeviceSpec) -> KernelUse:
    """The kernel that has a class; of a decode one more merges its splits, where it has some."""
    use, *others = kernel_uses(op, LIMITS[op], request, device)
    is_split = getattr(request, "phase", "") == "decode" and op != "index_logits"
    if isinstance(request, CompressedAttentionRequest) and 0 < request.top_k <= 512:
        is_split = False
    assert [one.kernel for one in others] == [f"{op}.merge"] * is_split
    return use


def check_class(op: str, request: OpRequest, device: DeviceSpec) -> None:
    """The class that a plan shows is one that tuning takes, and its call is of the same class."""
    use = attending_use(op, request, device)
    assert use.code.startswith(("native: ", "spilled: ", "emulated: ")), use
    tunable, target = TUNABLE[use.kernel], find_target(device.arch)
    shape = parse_shape(
        use.shape,
        size_names=tunable.size_names,
        forms=tunable.forms,
        dtypes=tunable.dtypes(target),
    )
    assert use.config == f"{shape.dtype} {tunable.default(target, shape).config}"
    call = tunable.call(shape, "meta") if op == "index_logits" else None
    if call is not None:
        assert classes_of(op, call.request, device) == ((use.kernel, shape),)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942", "gfx1100"])
def test_a_class_of_a_plan_is_one_that_tuning_takes(arch: str) -> None:
    for request in requests_of("bfloat16"):
        check_class(request.op, request, gpu(arch))


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("key_format", ["fp8_132", "fp4_68"])
def test_a_class_of_queries_in_eight_bits_is_one_that_tuning_takes(
    arch: str, phase: str, key_format: str
) -> None:
    check_class("index_logits", index_request("float8_e4m3fn", key_format, phase), gpu(arch))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1100"])
def test_float16_is_planned_without_a_class(arch: str) -> None:
    for request in requests_of("float16"):
        use = attending_use(request.op, request, gpu(arch))
        assert use.config.startswith("float16 fp16-"), use
        assert (use.basis, use.shape) == ("fixed", ""), use
        assert use.code
        assert classes_of(request.op, request, gpu(arch)) == ()


def test_a_form_that_a_dtype_has_not_is_refused_by_name() -> None:
    tunable, target = TUNABLE["index_logits.paged"], find_target("sm_90")
    text = "dtype=fp8_e4m3fn,form=bf16-decode,head_dim=128,heads=64,rows=16"
    with pytest.raises(UsageError, match=r"fp8_e4m3fn with bf16-decode"):
        named_classes([tunable], [text], target)
