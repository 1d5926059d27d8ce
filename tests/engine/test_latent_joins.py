"""Norm, rotation and write of one row a token: which calls of the models are one call."""

from __future__ import annotations

import dataclasses

import pytest

from absent_plans import plan, profile
from hal.ops.kv_write import KvWriteRequest
from hal.ops.latent_kv_write import LatentKvWriteRequest, bytes_moved
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.rope import RopeRequest
from hal.plan import OpSite
from hal.tiers import Tier
from hal_engine.config import load_model_config
from hal_engine.models.latent_joins import latent_joins
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from hal_engine.preset_files import load_presets

LIMITS = StepLimits(max_num_batched_tokens=512, max_num_seqs=32, block_size=64)
# A rope and a norm of V4's window, of its compressed rows and of their index keys.
V4 = {"window_kv_write", "compressor.rope_kv_write", "indexer.rope_kv_write"}


def sites_of(name: str) -> list[OpSite]:
    config = load_model_config(load_presets()[name].path)
    precision = resolve_precision(config, "auto", "auto", frozenset({"matrix.bfloat16"}))
    return model_sites(config, precision, LIMITS, 1)


def joined(sites: list[OpSite], layer: int) -> dict[str, tuple[LatentKvWriteRequest, list[str]]]:
    found = {}
    for join in latent_joins(sites):
        request = join.site.request
        if layer in join.site.layers:
            assert isinstance(request, LatentKvWriteRequest)
            names = [part.site.removeprefix("layers.*.") for part in join.parts]
            found[join.site.site.removeprefix("layers.*.")] = request, names
    return found


def test_the_latent_row_with_its_queries() -> None:
    """DeepSeek-V3.2: 512 values are normed, 64 more are rotated; of a query head the last 64."""
    found = joined(sites_of("deepseek-v3.2"), 10)
    assert set(found) == {"latent_kv_write", "indexer.rope_kv_write"}
    request, parts = found["latent_kv_write"]
    assert parts == ["kv_a_norm", "q_rope", "k_rope", "kv_write"]
    assert (request.norm_dim, request.row_dim, request.row_rotary_start) == (512, 576, 512)
    assert (request.num_heads, request.head_dim, request.q_rotary_start) == (128, 192, 128)
    assert not request.has_q_norm


@pytest.mark.parametrize(
    ("model", "style"), [("deepseek-v3.2", "half_split"), ("glm-5", "interleaved")]
)
def test_index_keys_with_their_queries(model: str, style: str) -> None:
    """Under a layer norm with a bias; the first 64 of 128 values are rotated."""
    request, parts = joined(sites_of(model), 10)["indexer.rope_kv_write"]
    assert parts == ["indexer.k_norm", "indexer.rope", "indexer.kv_write"]
    assert (request.row_norm_kind, request.norm_dim, request.row_dim) == ("layer", 128, 128)
    assert (request.style, request.row_rotary_start, request.q_rotary_start) == (style, 0, 0)
    assert request.num_heads > 1
    assert not request.has_q_norm


def test_a_norm_that_the_op_does_not_have_is_apart() -> None:
    sites = sites_of("deepseek-v3.2")
    (norm,) = [s for s in sites if s.site == "layers.*.indexer.k_norm"]
    assert isinstance(norm.request, LayerNormRequest)
    changed = dataclasses.replace(norm.request, has_bias=False)
    rest = [dataclasses.replace(s, request=changed) if s is norm else s for s in sites]
    assert set(joined(rest, 10)) == {"latent_kv_write"}


def test_window_compressed_rows_and_index_keys() -> None:
    sites = sites_of("deepseek-v4-flash")
    layers = {layer: joined(sites, layer) for layer in range(40)}
    assert {name for found in layers.values() for name in found} == V4
    every = next(found for found in layers.values() if set(found) == V4)
    request, parts = every["window_kv_write"]
    assert parts[0] == "kv_norm"
    assert parts[-2:] == ["rope", "window_write"]
    assert (request.row_dim, request.norm_dim) == (512, 512)
    request, parts = every["compressor.rope_kv_write"]
    assert parts == ["compressor.rope", "compressor.kv_write"]
    assert (request.num_heads, request.norm_dim) == (0, 0)


def test_rows_that_something_else_reads_are_apart() -> None:
    """DeepSeek-V4.1 makes its index keys of the compressed rows."""
    sites = sites_of("deepseek-v4.1-flash")
    readers = {n for s in sites if s.site == "layers.*.indexer.k_proj" for n in s.layers}
    assert readers
    for layer in range(40):
        found = joined(sites, layer)
        assert "window_kv_write" in found
        assert layer not in readers or "compressor.rope_kv_write" not in found


def test_other_angles_are_not_joined() -> None:
    sites = sites_of("deepseek-v3.2")
    (rope,) = [s for s in sites if s.site == "layers.*.k_rope"]
    assert isinstance(rope.request, RopeRequest)
    for other in ({"style": "half_split"}, {"is_inverse": True}, {"num_kv_heads": 1}):
        changed = dataclasses.replace(rope.request, **other)
        rest = [dataclasses.replace(s, request=changed) if s is rope else s for s in sites]
        assert set(joined(rest, 10)) == {"indexer.rope_kv_write"}


def test_bytes_are_those_of_one_pass() -> None:
    request, _ = joined(sites_of("deepseek-v3.2"), 10)["latent_kv_write"]
    write = request.kv_write()
    assert isinstance(write, KvWriteRequest)
    row = 576 * 2 + (656 if request.kv_format == "fp8_656" else 576 * 2) + 8
    assert bytes_moved(request, 3) == 3 * (2 * 128 * 64 * 2 + 64 * 4 + 8 + row) + 512 * 2


@pytest.mark.parametrize("model", ["deepseek-v3.2", "deepseek-v4-flash", "glm-5"])
@pytest.mark.parametrize("device", ["rtx-pro-6000-blackwell-server", "mi300x"])
def test_plans_take_them(model: str, device: str) -> None:
    ops = plan(model, profile(device), 8).ops
    found = [op for op in ops if op.site.request.op == "latent_kv_write"]
    assert found
    assert {op.decision.choice.tier for op in found} == {Tier.NATIVE}
    names = {op.site.site for op in ops}
    assert not {"layers.*.k_rope", "layers.*.kv_a_norm", "layers.*.window_write"} & names
