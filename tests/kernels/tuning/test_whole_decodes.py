"""Decodes of V4's attention that one program sees whole: what was tried split is not theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

import hal_kernels.compressed_attention.triton as compressed
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import find_target
from hal_kernels.compressed_attention.triton_limits import not_supported_reasons
from hal_kernels.compressed_attention.triton_tuning import shape_of
from hal_kernels.tuning.configuration_files import ConfigurationFile, ShapeEntry, Trial
from hal_kernels.tuning.store import (
    code_hash,
    configuration_path,
    device_key,
    save_configurations,
    triton_version,
    tuned_rows,
    user_store,
)
from hal_kernels.tuning.tunable_kernels import TUNABLE, classes_of
from hal_kernels.tuning.uses import kernel_uses

V41 = "compressed_attention.v41"
KEPT = {"BLOCK_N": 64, "num_stages": 2, "num_warps": 4}


def request_of(**fields: Any) -> CompressedAttentionRequest:
    defaults: dict[str, Any] = {
        "phase": "decode", "num_heads": 8, "head_dim": 512, "rope_dim": 64, "window": 128,
        "top_k": 512, "compress_ratio": 1, "has_sinks": True, "window_format": "v41_528",
        "main_format": "fp4_288", "block_size": 64, "dtype": "bfloat16",
        "tokens": TokenRange(1, 16),
    }  # fmt: skip
    return CompressedAttentionRequest(**(defaults | fields))


def keep(device: DeviceSpec, shape: str, configuration: Mapping[str, int]) -> None:
    """A complete entry of the kernel as it is, in the user's store."""
    trial = Trial(configuration=dict(configuration), us=1.0, tier="native", registers=333)
    entry = ShapeEntry(
        shape=shape, basis="measured", code=code_hash(V41), triton=triton_version() or "3.9.0",
        made="2026-11-30", is_complete=True, trials=[trial],
    )  # fmt: skip
    document = ConfigurationFile(
        device=device_key(device), arch=device.arch, kernel=V41, entries=[entry]
    )
    save_configurations(configuration_path(user_store(), device_key(device), V41), document)


@pytest.mark.parametrize("form", ["decode", "whole"])
def test_only_what_was_tried_whole_is_launched_whole(device: DeviceSpec, form: str) -> None:
    request = request_of()
    known = shape_of(request, device)
    assert known is not None
    text = str(known[1])
    assert "form=fp4_288-sparse-whole,entries=512," in text
    keep(device, text.replace("-whole", f"-{form}"), KEPT)
    default = TUNABLE[V41].default(find_target(device.arch), known[1])
    assert default.config == "fp4_288-sparse-prefill"
    found = tuned_rows(known, device).choose(16, default.configuration)
    assert found == (KEPT if form == "whole" else default.configuration)
    (use,) = kernel_uses("compressed_attention", not_supported_reasons, request, device)
    assert use.config == "bfloat16 fp4_288-sparse-prefill"
    assert use.basis == ("measured" if form == "whole" else "default")


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, "fp4_288-sparse-whole"),
        ({"top_k": 513}, "fp4_288-sparse-decode"),
        ({"top_k": 0}, "fp4_288-dense-decode"),
        ({"compress_ratio": 0, "top_k": 0}, "v41_528-window-whole"),
        ({"phase": "prefill"}, "fp4_288-sparse-prefill"),
        ({"phase": "prefill", "compress_ratio": 0, "top_k": 0}, "v41_528-window-prefill"),
    ],
)
def test_the_form_of_a_class_is_the_one_that_is_launched(
    fields: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, device = request_of(**fields), gpu("gfx942")
    ((kernel, shape),) = classes_of("compressed_attention", request, device)
    assert (kernel, shape.form) == (V41, form)
    seen: list[bool] = []
    is_whole = compressed.is_whole

    def asked(**names: Any) -> bool:
        seen.append(is_whole(**names))
        return seen[-1]

    monkeypatch.setattr(compressed, "is_whole", asked)
    compressed.bind(request, device, scale=1.0)
    assert seen == [not form.endswith("-decode")]
    tunable, target = TUNABLE[V41], find_target("gfx942")
    assert not tunable.why_never(target, shape, None)
    assert shape.form in tunable.forms


def test_what_is_read_and_written_is_that_of_the_launch() -> None:
    """Whole decodes write no parts; split ones of as many entries would."""
    whole = shape_of(request_of(), gpu("gfx942"))
    assert whole is not None
    tunable, shape = TUNABLE[V41], whole[1]
    split = dataclasses.replace(shape, form="fp4_288-sparse-decode")
    configuration = tunable.default(find_target("gfx942"), shape).configuration
    less, more = (tunable.footprint(one, configuration) for one in (shape, split))
    assert more.memory_bytes - less.memory_bytes == 4.0 * 16 * 8 * 512
    assert less.programs == more.programs == 16
