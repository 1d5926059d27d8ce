"""What limits judge is what is launched, of kernels without a product: the form that a limit names
has the launch's constants, or as many values in its registers and more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import hal_kernels.embedding.triton as embedding
import hal_kernels.engram.triton as engram
import hal_kernels.moe_dispatch.triton as dispatch
import hal_kernels.moe_router.triton as router
import hal_kernels.sampling.triton as sampling
from gpu_devices import gpu
from hal.errors import RequestError
from hal.ops.embedding import EmbeddingRequest
from hal.ops.engram import EngramRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest
from hal.ops.sampling import TopKTopPRequest
from hal_backends.gpu.triton_kernels import op_limits
from hal_kernels.aot.limits import evidence_asked
from hal_kernels.aot.targets import TARGETS
from hal_kernels.aot.variant import KernelVariant
from recorded_launches import compiled, recorded

ARCHES = [target.arch for target in TARGETS]
TOKENS = 3
Launch = Mapping[str, Any]


def served(request: Any, arch: str) -> dict[str, list[KernelVariant]]:
    """Kernel -> the variants by which the limits judge a request; none where it is refused."""
    limits, device = op_limits(request.op), gpu(arch)
    assert limits is not None
    if limits(request, device):
        return {}
    judged: dict[str, list[KernelVariant]] = {}
    for query in evidence_asked(limits, request, device):
        variant = compiled(query.kernel, arch, query.dtype, query.config)
        judged.setdefault(query.kernel, []).append(variant)
    return judged


def check_options(launched: Launch, variant: KernelVariant) -> None:
    assert launched.get("num_warps", 4) == variant.num_warps
    assert launched.get("num_stages", variant.num_stages) == variant.num_stages


def router_requests() -> list[MoeRouterRequest]:
    found = []
    for scoring, experts, groups, has_bias, top_k in itertools.product(
        ("softmax", "sigmoid", "sqrt_softplus", "hash"), (8, 60, 128, 160, 256, 384, 512, 1024),
        (1, 2, 8, 16), (False, True), (1, 6, 8, 22),
    ):  # fmt: skip
        try:
            found.append(
                MoeRouterRequest(
                    scoring=scoring,  # type: ignore[arg-type]
                    num_experts=experts, top_k=top_k, num_groups=groups,
                    num_groups_picked=max(groups // 2, 1), has_bias=has_bias,
                )
            )  # fmt: skip
        except RequestError:
            continue
    return found


@pytest.mark.parametrize("arch", ARCHES)
def test_choice_of_experts(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "moe_router.scored": "_moe_router_kernel",
        "moe_router.hash": "_moe_router_hash_kernel",
    }
    found = recorded(monkeypatch, (router,), *names.values())
    seen: set[str] = set()
    for request in router_requests():
        for kernel, (variant,) in served(request, arch).items():
            static: dict[str, Any] = {"bias": None, "expert_table": None}
            if request.has_bias:
                static["bias"] = torch.zeros(request.num_experts)
            logits, ids = torch.zeros(TOKENS, request.num_experts), None
            if request.scoring == "hash":
                static["expert_table"] = torch.zeros(5, request.top_k, dtype=torch.int64)
                ids = torch.zeros(TOKENS, dtype=torch.int64)
            router.bind(request, gpu(arch), **static)(logits, ids)
            (launched,) = found[names[kernel]]
            check_router(launched, variant, request)
            seen.add(variant.config)
            found[names[kernel]].clear()
    assert len(seen) == 4 * 3 + 2 * 3 + 2  # sizes, those in groups, by hash


def check_router(launched: Launch, variant: KernelVariant, request: MoeRouterRequest) -> None:
    constants = variant.constants
    assert constants["NORMALIZES"] == launched["NORMALIZES"]
    if request.scoring == "hash":
        check_options(launched, variant)
        assert launched["BLOCK_T"] == constants["BLOCK_T"]
        assert launched["BLOCK_K"] <= constants["BLOCK_K"]
        return
    assert launched["SCORING"] == constants["SCORING"]
    assert constants["HAS_BIAS"] or not launched["HAS_BIAS"]
    is_grouped = launched["G"] > launched["PICKED"]
    assert is_grouped == (constants["G"] > constants["PICKED"])
    shapes = [{name: one[name] for name in "THC"} for one in (launched, constants)]
    values = [one["T"] * one["H"] * one["C"] for one in shapes]
    of_warp = [values[0] // launched["num_warps"], values[1] // variant.num_warps]
    assert of_warp[0] <= of_warp[1]
    if not is_grouped and request.num_experts >= 128:
        assert shapes[0] == shapes[1]
    if is_grouped:
        assert launched["G"] <= constants["G"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942", "gfx1100"])
def test_dispatch(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"moe_dispatch.{n}": f"_moe_{n}_kernel" for n in ("places", "spread", "invert")}
    names["moe_dispatch.combine"] = "_moe_combine_kernel"
    found = recorded(monkeypatch, (dispatch,), *names.values())
    for kind, top_k, hidden, tokens in itertools.product(
        ("permute", "combine"), (1, 8, 9, 32), (64, 7168), (2, 800)
    ):
        request = MoeDispatchRequest(
            kind=kind,  # type: ignore[arg-type]
            num_experts=64, top_k=top_k, hidden_size=hidden, dtype="bfloat16", graph_mode="graph",
        )  # fmt: skip
        judged = served(request, arch)
        assert judged
        call = dispatch.bind(request, gpu(arch))
        rows = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        if kind == "permute":
            call(rows, torch.zeros(tokens, top_k, dtype=torch.int32))
        else:
            call(rows, torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, top_k))
        for kernel, variants in judged.items():
            (launched,) = found[names[kernel]]
            held = [v for v in variants if holds(launched, v, "BLOCK_F", "BLOCK_M")]
            assert held, kernel
            for name in ("TOP_K", "BLOCK_D"):
                assert launched.get(name, 0) <= held[0].constants.get(name, 0), name
            check_options(launched, held[0])
        for launches in found.values():
            launches.clear()


def holds(launched: Launch, variant: KernelVariant, *names: str) -> bool:
    return all(launched.get(name) == variant.constants.get(name) for name in names)


def one_launch(
    found: Mapping[str, list[dict[str, Any]]], request: Any, arch: str, call: Callable[[], Any]
) -> tuple[Launch, KernelVariant]:
    """What a request of one kernel launches, and by which variant it is judged."""
    (variants,) = served(request, arch).values()
    (variant,) = variants
    call()
    (launched,) = itertools.chain(*found.values())
    for launches in found.values():
        launches.clear()
    check_options(launched, variant)
    return launched, variant


@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942", "gfx1100"])
def test_engram(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, (engram,), "_engram_gather_kernel", "_engram_mix_kernel")
    shared: dict[str, Any] = {"max_ngram": 3, "hidden_size": 64, "dtype": "bfloat16"}
    for heads, width in ((1, 32), (3, 96), (8, 256), (8, 288), (16, 512), (32, 256)):
        request = EngramRequest(
            kind="gather", num_heads=heads, row_width=width, num_streams=2, **shared
        )
        numbers = torch.zeros(2, heads, dtype=torch.int64)
        static = {
            "table": torch.zeros(4, width + width // 32, dtype=torch.uint8),
            "multipliers": numbers[0, :1], "primes": numbers, "offsets": numbers,
        }  # fmt: skip
        kernel = engram.bind(request, gpu(arch), **static)
        ids = torch.zeros(TOKENS, 3, dtype=torch.int64)
        launched, variant = one_launch(found, request, arch, lambda k=kernel, i=ids: k(i))
        values = [one["BLOCK_H"] * one["BLOCK_W"] for one in (launched, variant.constants)]
        assert values[0] <= values[1]
    for streams in (1, 2, 4, 5, 8):
        request = EngramRequest(
            kind="mix", num_heads=2, row_width=32, num_streams=streams, **shared
        )
        rows = torch.zeros(TOKENS, streams, 64, dtype=torch.bfloat16)
        kernel = engram.bind(request, gpu(arch), query_weight=rows[0], key_weight=rows[0])
        kv = torch.zeros(TOKENS, (streams + 1) * 64, dtype=torch.bfloat16)
        launched, variant = one_launch(
            found, request, arch, lambda k=kernel, r=rows, kv=kv: k(r, kv)
        )
        assert launched["N"] <= variant.constants["N"]
        assert launched["BLOCK_D"] == variant.constants["BLOCK_D"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942", "gfx1100"])
def test_gather_and_filter(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch, (embedding, sampling), "_embedding_kernel", "_top_k_top_p_kernel")
    for hidden in (64, 7168):
        gather = EmbeddingRequest(vocab_size=5, hidden_size=hidden, dtype="float16")
        kernel = embedding.bind(gather, gpu(arch), weight=torch.zeros(5, hidden).half())
        launched, variant = one_launch(
            found, gather, arch, lambda k=kernel: k(torch.zeros(TOKENS, dtype=torch.int64))
        )
        assert launched["BLOCK_H"] <= variant.constants["BLOCK_H"]
    request = TopKTopPRequest(vocab_size=3000)
    keep = sampling.bind(request, gpu(arch))
    rows, ones = torch.zeros(TOKENS, 3000), torch.ones(TOKENS)
    launched, variant = one_launch(found, request, arch, lambda: keep(rows, ones.long(), ones))
    assert {name: launched[name] for name in variant.constants} == dict(variant.constants)


REFUSED: Sequence[tuple[Any, str]] = (
    (MoeRouterRequest(scoring="softmax", num_experts=8, top_k=2, has_bias=True), "bias"),
    (MoeRouterRequest(scoring="sigmoid", num_experts=8, top_k=2, dtype="bfloat16"), "float32"),
    (MoeRouterRequest(scoring="sigmoid", num_experts=2048, top_k=2), "at most 1024"),
    (MoeRouterRequest(scoring="hash", num_experts=64, top_k=33), "at most 32"),
    (
        MoeRouterRequest(
            scoring="sigmoid", num_experts=256, top_k=2, num_groups=16, num_groups_picked=4
        ),
        "at most 8 groups",
    ),
    (
        MoeDispatchRequest(
            kind="combine", num_experts=64, top_k=33, hidden_size=64, dtype="bfloat16"
        ),
        "at most 32",
    ),
    (
        EngramRequest(
            kind="mix", num_heads=2, row_width=32, num_streams=9, max_ngram=2, hidden_size=64,
            dtype="bfloat16",
        ),
        "at most 8",
    ),
    (
        EngramRequest(
            kind="gather", num_heads=9, row_width=544, num_streams=1, max_ngram=2, hidden_size=64,
            dtype="bfloat16",
        ),
        "at most 8192 values",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("request_", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_no_form_is_compiled_for_is_refused(request_: Any, told: str) -> None:
    limits = op_limits(request_.op)
    assert limits is not None
    (reason,) = limits(request_, gpu("sm_90"))
    assert told in f"{reason.what} {reason.required}"
