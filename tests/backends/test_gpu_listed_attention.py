"""Attention over listed blocks and native sparse attention are offered as far as evidence goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.ops.nsa_attention import NsaAttentionRequest
from hal.ops.nsa_compress import NsaCompressRequest
from hal.tiers import Tier
from hal_backends.gpu import triton_kernels
from hal_kernels.aot.targets import TARGETS

LISTED = BlockSparseAttentionRequest(
    phase="prefill",
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    v_head_dim=128,
    query_block=64,
    key_block=64,
    num_selected=16,
    block_size=64,
    dtype="bfloat16",
)
NSA = NsaAttentionRequest(
    phase="prefill",
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    v_head_dim=128,
    block_size=64,
    dtype="bfloat16",
)
COMPRESS = NsaCompressRequest(
    phase="prefill",
    num_kv_heads=4,
    head_dim=192,
    hidden_size=384,
    block_size=64,
    dtype="bfloat16",
)
REQUESTS: dict[str, Any] = {
    "listed": LISTED,
    "listed, a list a query": dataclasses.replace(LISTED, query_block=1, window=128),
    "nsa prefill": NSA,
    "nsa decode": dataclasses.replace(NSA, phase="decode"),
    "nsa 32 blocks": dataclasses.replace(NSA, num_selected=32),
    "nsa compression prefill": COMPRESS,
    "nsa compression decode": dataclasses.replace(COMPRESS, phase="decode"),
}


def device_of(arch: str) -> DeviceSpec:
    return dataclasses.replace(
        gpu(arch),
        features=frozenset({"triton", "matrix.bfloat16", "matrix.float16"}),
        software={"triton": "3.9.0"},
    )


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", [target.arch for target in TARGETS])
def test_the_default_form_is_native_everywhere(arch: str, dtype: str, name: str) -> None:
    request = dataclasses.replace(REQUESTS[name], dtype=dtype)
    (offered,) = triton_kernels.candidates(request.op, device_of(arch))
    assert offered.tier is Tier.NATIVE
    assert not offered.not_supported_reasons(request)
    instruction = next(leaf for leaf in offered.leaf if leaf.kind == "instruction")
    assert any(word in instruction.name for word in ("mma", "mfma"))


@pytest.mark.parametrize("request_", [LISTED, NSA, COMPRESS], ids=lambda r: r.op)
def test_an_architecture_without_evidence_is_not_served(request_: Any) -> None:
    (offered,) = triton_kernels.candidates(request_.op, device_of("sm_999"))
    reasons = offered.not_supported_reasons(request_)
    assert any("no evidence" in reason.found for reason in reasons)
    plain = dataclasses.replace(device_of("sm_90"), features=frozenset({"triton"}))
    (offered,) = triton_kernels.candidates(request_.op, plain)
    assert any("matrix.bfloat16" in r.required for r in offered.not_supported_reasons(request_))
