"""Tunable attention and indexers: launches take what is kept, and the result stays right."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.nsa_attention import NsaAttentionRequest
from hal.ops.request import TokenRange
from hal_kernels.aot.catalogue import CATALOGUE as KERNELS
from hal_kernels.aot.targets import find_target
from hal_kernels.nsa_attention import triton_limits as nsa_limits
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.store import forced_configuration
from hal_kernels.tuning.tunable import Call
from hal_kernels.tuning.tunable_kernels import TUNABLE, classes_of
from hal_kernels.tuning.uses import kernel_uses

_BLOCKS = {"group": 2, "head_dim": 24, "key_block": 64, "kv_heads": 1, "places": 2}
_ENTRIES = {"entries": 25, "head_dim": 512, "heads": 3, "ratio": 4, "window": 20}
_WINDOW = {"entries": 1, "head_dim": 512, "heads": 3, "ratio": 1, "window": 20}
_LATENT = {"keys": 100, "rank": 32, "rope": 64}
_INDEX = {"heads": 3, "head_dim": 128}
# Blocks that are all selected: of almost equal ones none is left to rounding.
_NSA = {
    "group": 2, "head_dim": 24, "kv_heads": 1, "places": 4, "select": 32, "stride": 16,
    "window": 20,
}  # fmt: skip
CASES: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("block_sparse_attention.paged", "d64-block", {**_BLOCKS, "query_block": 8}),
    ("block_sparse_attention.paged", "d64-token", {**_BLOCKS, "query_block": 1}),
    ("compressed_attention.paged", "bf16-dense-decode", _ENTRIES),
    ("compressed_attention.paged", "v4_584-sparse-prefill", _ENTRIES),
    ("compressed_attention.v41", "fp4_288-sparse-whole", _ENTRIES),
    ("compressed_attention.paged", "bf16-window-prefill", _WINDOW),
    ("compressed_attention.paged", "v4_584-window-whole", _WINDOW),
    ("compressed_attention.v41", "v41_528-window-whole", _WINDOW),
    ("index_logits.paged", "bf16-prefill", _INDEX),
    ("index_logits.paged", "fp8_132-decode", _INDEX),
    ("index_logits.fp4", "fp4_68-prefill", _INDEX),
    ("mla_attention.paged", "bf16-dense-decode", {**_LATENT, "heads": 3}),
    ("mla_attention.paged", "bf16-sparse-prefill-h32", {**_LATENT, "heads": 20}),
    ("mla_attention.wide", "fp8_656-sparse-decode", {**_LATENT, "heads": 64, "rank": 512}),
    ("nsa_attention.entries", "d128-whole", _NSA),
    ("nsa_attention.branch", "d128-window", _NSA),
    ("nsa_attention.branch", "d128-split", _NSA),
)


def widened(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: widened(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    is_wide = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_wide else value


def exact_of(op: str, call: Call) -> torch.Tensor:
    static = {name: widened(value) for name, value in call.static.items()}
    golden = CATALOGUE[op].reference(call.request, **static)
    result: torch.Tensor = golden(*map(widened, call.args))
    return result


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts that the interpreter goes through in a moment."""
    for name in {TUNABLE[name].module for name, _, _ in CASES}:
        module = importlib.import_module(name.replace(".triton", ".triton_tuning"))
        monkeypatch.setattr(module, "KEYS", 100)


@pytest.mark.parametrize(("name", "form", "sizes"), CASES)
def test_the_operands_of_a_class_are_of_its_class_and_any_configuration_is_right(
    name: str, form: str, sizes: Mapping[str, int], few_keys: None
) -> None:
    target, device, tunable = find_target("sm_90"), gpu("sm_90"), TUNABLE[name]
    shape = shape_class(tunable.dtypes(target)[0], form, 5, sizes)
    call, op = tunable.call(shape, "cpu"), KERNELS[name].op
    assert (name, shape) in classes_of(op, call.request, device)
    exact = exact_of(op, call)
    configurations = tunable.configurations(target, shape)
    assert len(configurations) >= 6
    module = importlib.import_module(tunable.module)
    for configuration in (configurations[0], configurations[-1]):
        with forced_configuration(name, configuration, form) as forced:
            kernel = module.bind(call.request, device, **call.static)
            found = kernel(*call.args)
        assert forced.is_launched
        assert torch.equal(found.isinf(), exact.isinf())
        size = exact.masked_fill(exact.isinf(), 0.0).abs().max()
        error = (found.double() - exact).nan_to_num(neginf=0.0).abs().max()
        assert error <= 2.0**-6 * size, configuration


def modelled(name: str, shape: ShapeClass, **changes: int) -> Any:
    tunable = TUNABLE[name]
    default = tunable.default(find_target("sm_90"), shape).configuration
    return tunable.footprint(shape, dict(default) | changes)


def test_what_a_footprint_counts_is_what_the_op_counts() -> None:
    """Against the catalogue's own count, which was written for the roofline."""
    shape = shape_class(
        "bfloat16", "d128-block", 4096,
        {"group": 4, "head_dim": 128, "key_block": 64, "kv_heads": 8, "places": 16,
         "query_block": 64},
    )  # fmt: skip
    found = modelled("block_sparse_attention.paged", shape)
    assert found.needed_flops == 4.0 * 4096 * 32 * 16 * 64 * 128
    # Each row of the context once, the queries, the result and the lists.
    assert found.memory_bytes == 4 * 4096 * 8 * 128 + 4 * 4096 * 32 * 128 + 4 * 64 * 8 * 16
    assert modelled("block_sparse_attention.paged", shape, BLOCK_Q=8).programs == 512 * 8
    shape = shape_class("bfloat16", "bf16-decode", 16, {"heads": 64, "head_dim": 128})
    found = modelled("index_logits.paged", shape)
    request = TUNABLE["index_logits.paged"].call(shape, "meta").request
    assert found.needed_flops == pytest.approx(2.0 * 16 * 4096 * 64 * 128)
    assert request.num_heads == 64
    tall = modelled("index_logits.paged", shape, BLOCK_N=32)
    assert tall.programs == 16 * 4096 // 32
    assert tall.flops == found.flops


def test_tiles_lie_in_one_block_of_queries_and_of_keys() -> None:
    tunable, target = TUNABLE["block_sparse_attention.paged"], find_target("gfx942")
    for form, query_block in (("d64-block", 12), ("d64-block", 1), ("d64-token", 64)):
        sizes = {**_BLOCKS, "key_block": 48, "query_block": query_block}
        shape = shape_class("bfloat16", form, 100, sizes)
        for configuration in tunable.configurations(target, shape):
            queries = 1 if form == "d64-token" else query_block
            assert queries % configuration["BLOCK_Q"] == 0
            assert 48 % configuration["BLOCK_N"] == 0
            assert configuration["BLOCK_Q"] * configuration["BLOCK_G"] >= 16
            assert configuration["num_stages"] == 1


def nsa_request(phase: Any) -> NsaAttentionRequest:
    return NsaAttentionRequest(
        phase=phase, num_heads=64, num_kv_heads=4, head_dim=128, v_head_dim=128, block_size=64,
        dtype="bfloat16", tokens=TokenRange(1, 4096),
    )  # fmt: skip


def test_a_plan_has_a_row_for_each_form_that_a_request_launches(device: DeviceSpec) -> None:
    """With the class and what its default may lose by the model."""
    limits = nsa_limits.not_supported_reasons
    uses = kernel_uses("nsa_attention", limits, nsa_request("prefill"), device)
    rows = [use for use in uses if use.basis == "default"]
    assert [(use.kernel, use.config) for use in rows] == [
        ("nsa_attention.entries", "bfloat16 d128-whole"),
        ("nsa_attention.branch", "bfloat16 d128-selected"),
        ("nsa_attention.branch", "bfloat16 d128-window"),
    ]
    for use in rows:
        form = use.config.partition(" ")[2]
        assert f"form={form}," in use.shape
        assert use.loss is not None
        assert 0.0 <= use.loss < 1.0
        assert "by the model" in use.note
    decode = kernel_uses("nsa_attention", limits, nsa_request("decode"), device)
    assert [use.kernel for use in decode if use.shape] == [
        "nsa_attention.entries",
        "nsa_attention.branch",
    ]
