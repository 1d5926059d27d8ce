"""Rules for attention, on traces written by hand and against torch's own selection."""

from __future__ import annotations

import random

import pytest
import torch

from hal.auditing.document import Machine
from hal.auditing.gates import GateClass, Severity
from hal.auditing.rules.sdpa_backends import AttentionArguments, backend_of, exclusions
from hal.auditing.trace import ObservedOp, TensorFact
from traces import (
    HOPPER,
    attention,
    findings,
    gated,
    line,
    only,
    op,
    product,
    tensor,
    trace,
)

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


def _half(*shape: int, **facts: object) -> TensorFact:
    return tensor(*shape, dtype="bfloat16", device="cuda", **facts)


@pytest.mark.parametrize(
    ("leaf", "backend"),
    [
        (FLASH, "flash"),
        ("aten::_scaled_dot_product_flash_attention", "flash"),
        ("aten::_scaled_dot_product_efficient_attention", "efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn"),
        ("aten::_scaled_dot_product_fused_attention_overrideable", "fused"),
        ("aten::_scaled_dot_product_attention_math", "math"),
        ("aten::bmm", "math"),
        ("aten::view", "unknown"),
    ],
)
def test_leaf_names_the_backend(leaf: str, backend: str) -> None:
    assert backend_of([leaf, "aten::view"]) == backend


def test_math_path_names_each_constraint_and_what_was_found() -> None:
    query = tensor(2, 4, 64, 32)
    mask = tensor(4, 64, 64, requires_grad=True)
    seen = trace(functions=[attention(query, attn_mask=mask, dropout_p=0.25, at=line(7))])
    found = only(seen, "sdpa-math-path")
    assert found.gate is GateClass.LOST_FAST_PATH
    assert (found.location, found.calls, found.op) == (line(7), 4, "attention")
    by_what = {evidence.what: evidence for evidence in found.evidence}
    assert by_what["flash: dropout_p"].found == "0.25"
    assert by_what["flash: attn_mask.requires_grad"].required == "False"
    assert by_what["flash: shape of attn_mask"].found == "[4, 64, 64]"
    assert "dropout_p=0.0" in found.remedy


def test_math_path_on_a_gpu_says_why_each_of_three_kernels_was_excluded() -> None:
    query = _half(2, 4, 64, 300)
    mask = _half(2, 4, 64, 64)
    seen = trace(functions=[attention(query, attn_mask=mask)], machine=HOPPER)
    found = only(seen, "sdpa-math-path")
    whats = {evidence.what for evidence in found.evidence}
    assert {"flash: attn_mask", "flash: head_dim", "efficient: head_dim"} <= whats
    assert "cudnn: head_dim" in whats


def test_math_path_without_a_known_reason_says_so() -> None:
    found = only(trace(functions=[attention(tensor(2, 4, 64, 32))]), "sdpa-math-path")
    assert found.evidence[0].found == "none found"


@pytest.mark.parametrize("shape", [(0, 4, 64, 32), (2, 4, 0, 32)])
def test_attention_over_nothing_loses_nothing(shape: tuple[int, ...]) -> None:
    assert not gated(trace(functions=[attention(tensor(*shape))]))


def test_attention_that_nobody_saw_is_unverified() -> None:
    call = attention(tensor(2, 4, 64, 32), leaf="aten::view")
    assert only(trace(functions=[call]), "attention-not-seen").gate is GateClass.UNVERIFIED


def test_fused_attention_is_no_finding() -> None:
    assert not gated(trace(functions=[attention(tensor(2, 4, 64, 32), leaf=FLASH)]))


def test_disabled_kernels_are_named_where_the_program_disabled_them() -> None:
    call = attention(tensor(2, 4, 64, 32), settings={"flash_sdp": "False"})
    seen = trace(functions=[call], settings_places={"flash_sdp": line(3)})
    assert only(seen, "fused-attention-disabled").location == line(3)
    assert "flash: torch setting" in {e.what for e in only(seen, "sdpa-math-path").evidence}


def test_memory_efficient_instead_of_flash_is_advice() -> None:
    leaf = "aten::_scaled_dot_product_efficient_attention"
    call = attention(_half(1, 4, 64, 64), attn_mask=_half(1, 4, 64, 64), leaf=leaf)
    found = only(trace(functions=[call], machine=HOPPER), "sdpa-second-best")
    assert found.gate is GateClass.ADVICE
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize(
    ("pattern", "lengths", "instead"),
    [
        ("causal", (64, 64), "is_causal=True"),
        ("all-true", (64, 64), "no mask"),
        ("causal", (32, 64), None),
        ("", (64, 64), None),
    ],
)
def test_masks_that_say_what_a_flag_says(
    pattern: str, lengths: tuple[int, int], instead: str | None
) -> None:
    mask = tensor(*lengths, dtype="bool", pattern=pattern)
    query, key = tensor(2, 4, lengths[0], 32), tensor(2, 4, lengths[1], 32)
    found = findings(
        trace(functions=[attention(query, key, attn_mask=mask, leaf=FLASH)]), "sdpa-needless-mask"
    )
    assert [instead in f.remedy for f in found if instead] == [True] * (instead is not None)
    assert bool(found) == (instead is not None)


def test_one_line_that_ends_in_two_kernels_is_a_leaf_mismatch() -> None:
    fast, slow = tensor(2, 4, 64, 32), tensor(2, 4, 64, 48)
    calls = [attention(fast, leaf=FLASH), attention(slow, value=fast)]
    found = only(trace(functions=calls), "leaf-by-arguments")
    assert found.gate is GateClass.LEAF_MISMATCH
    assert "48" in " ".join(e.found for e in found.evidence)


def _by_hand(head_dim: int, number: int) -> list[object]:
    scores = tensor(8, 64, 64)
    return [
        op("bmm", [tensor(8, 64, head_dim), tensor(8, head_dim, 64)], scores, at=line(number)),
        op("_softmax", [tensor(2, 4, 64, 64)], tensor(2, 4, 64, 64), at=line(number + 1)),
        op("bmm", [scores, tensor(8, 64, head_dim)], tensor(8, 64, head_dim), at=line(number + 2)),
    ]


def test_attention_by_hand_is_found_at_its_softmax() -> None:
    found = only(trace(*_by_hand(32, 40)), "attention-by-hand")
    assert found.location == line(41)
    assert found.time_us == pytest.approx(120.0)


def test_a_router_is_no_attention() -> None:
    """Softmax between two products whose other factors are weights."""
    logits = tensor(64, 8)
    weight = tensor(32, 8, is_constant=True)
    ops = [
        op("mm", [tensor(64, 32), weight], logits),
        op("_softmax", [logits], logits),
        op("mm", [logits, tensor(8, 32, is_constant=True)], tensor(64, 32)),
    ]
    assert not findings(trace(*ops), "attention-by-hand")


def test_products_in_another_function_are_no_attention() -> None:
    ops = _by_hand(32, 40)
    ops[0].location = line(40, "elsewhere")  # type: ignore[attr-defined]
    assert not findings(trace(*ops), "attention-by-hand")


def test_a_wrapper_that_branches_by_head_dim() -> None:
    calls = [attention(tensor(2, 4, 64, 32), leaf=FLASH, at=line(38))]
    found = only(trace(*_by_hand(96, 40), functions=calls), "wrapper-branches-by-head-dim")
    assert found.gate is GateClass.LEAF_MISMATCH
    assert found.evidence[0].found == "96"
    same = trace(*_by_hand(32, 40), functions=calls)
    assert not findings(same, "wrapper-branches-by-head-dim")


def test_heads_expanded_before_attention() -> None:
    expanded = tensor(2, 2, 4, 64, 32, is_contiguous=False)
    copy = op("clone", [expanded], tensor(2, 2, 4, 64, 32), at=line(5, "repeat_kv"))
    calls = [attention(tensor(2, 8, 64, 32), leaf=FLASH)]
    found = only(trace(copy, functions=calls), "kv-heads-expanded")
    assert "4 times" in found.title
    assert found.cost_us == pytest.approx(40.0)
    alone = trace(copy, functions=[attention(tensor(2, 16, 64, 32), leaf=FLASH)])
    assert not findings(alone, "kv-heads-expanded")
    assert "enable_gqa" in found.remedy
    assert "CUDA" not in found.remedy


def test_heads_expanded_beside_a_mask_on_cuda_have_another_remedy() -> None:
    copy = op("clone", [_half(2, 2, 4, 64, 32, is_contiguous=False)], _half(2, 2, 4, 64, 32))
    masked = attention(_half(2, 8, 64, 32), attn_mask=_half(2, 1, 64, 64), leaf=EFFICIENT)
    found = only(trace(copy, functions=[masked], machine=HOPPER), "kv-heads-expanded")
    assert "not with a mask" in found.remedy


def test_a_cache_that_grows_by_cat() -> None:
    def grow(length: int, **facts: object) -> object:
        old, new = tensor(1, 4, length, 32, **facts), tensor(1, 4, 1, 32, **facts)
        return op("cat", [old, new], tensor(1, 4, length + 1, 32, **facts), calls=1)

    found = only(trace(*(grow(n) for n in range(30, 38))), "kv-cache-concatenated")
    assert found.calls == 8
    assert not findings(trace(*(grow(30) for _ in range(8))), "kv-cache-concatenated")
    ids = trace(*(grow(n, dtype="int64") for n in range(30, 38)))
    assert not findings(ids, "kv-cache-concatenated")


def test_a_cache_whose_rows_are_reordered_step_by_step() -> None:
    rows = tensor(4, dtype="int64")

    def pick(length: int, **facts: object) -> ObservedOp:
        cache = tensor(4, 4, length, 64, **facts)
        return op("index_select", [cache, rows], cache, calls=2, function="index_select")

    encoder = pick(48)
    found = only(trace(encoder, *(pick(n) for n in range(1, 9))), "kv-cache-reordered")
    assert found.calls == 18
    assert found.evidence[0].found == "float32[4, 4, 48, 64], whole"
    shuffled = trace(*(pick(n) for n in (31, 17, 64, 48, 9, 77)))
    assert not findings(shuffled, "kv-cache-reordered")
    assert not findings(trace(*(pick(n, dtype="int64") for n in range(9))), "kv-cache-reordered")


def test_a_mask_that_every_layer_puts_together_again() -> None:
    bias, mask = tensor(2, 4, 48, 48), tensor(2, 1, 48, 48, dtype="bool")
    calls = [attention(tensor(2, 4, 48, 64), attn_mask=bias, leaf=FLASH, calls=8)]
    again = op("where", [mask, bias], bias, calls=8, repeats=7)
    found = only(trace(again, functions=calls, steps=1), "mask-made-again")
    assert found.cost_us == pytest.approx(70.0)
    fresh = op("where", [mask, bias], bias, calls=8)
    assert not gated(trace(fresh, functions=calls, steps=1))
    other = op("where", [mask, bias], tensor(2, 4, 48, 96), calls=8, repeats=7)
    assert not gated(trace(other, functions=calls, steps=1))


_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _random_call(seed: int) -> tuple[AttentionArguments, list[torch.Tensor | None]]:
    """A random call of attention, mostly near what the fused kernel takes."""
    draw = random.Random(seed)
    often = lambda usual, *rare: usual if draw.random() < 0.8 else draw.choice(rare)  # noqa: E731
    heads, dim, length = draw.choice([2, 4]), draw.choice([8, 16]), draw.choice([1, 6])
    keys = often(length, 5)
    is_grouped = draw.random() < 0.2
    kv_heads = 2 if is_grouped else heads
    dtype = draw.choice(list(_DTYPES))
    shapes = [
        (2, heads, length, dim),
        (2, kv_heads, keys, dim),
        (2, kv_heads, keys, often(dim, dim + 8)),
    ]
    if draw.random() < 0.1:
        shapes = [shape[1:] for shape in shapes]
    tensors = [torch.randn(shape, dtype=_DTYPES[dtype]) for shape in shapes]
    if draw.random() < 0.1:
        tensors[1] = tensors[1].transpose(-1, -2).contiguous().transpose(-1, -2)
    mask = None
    if draw.random() < 0.5:
        shape = draw.choice(
            [
                (length, keys),
                (1, keys),
                (2, 1, length, keys),
                (heads, length, keys),
                (1, 1, 1, keys),
            ]
        )
        mask = torch.randn(shape, dtype=_DTYPES[dtype])
        mask.requires_grad_(draw.random() < 0.2)
    facts = [_fact(t) for t in tensors]
    arguments = AttentionArguments(
        query=facts[0],
        key=facts[1],
        value=facts[2],
        mask=None if mask is None else _fact(mask),
        dropout_p=often(0.0, 0.5),
        is_causal=mask is None and draw.random() < 0.3,
        enable_gqa=is_grouped,
    )
    return arguments, [*tensors, mask]


def _fact(seen: torch.Tensor) -> TensorFact:
    return TensorFact(
        shape=tuple(seen.shape),
        dtype=str(seen.dtype).removeprefix("torch."),
        is_contiguous=seen.is_contiguous(),
        requires_grad=seen.requires_grad,
        last_stride=seen.stride(-1),
    )


def test_constraints_of_the_cpu_are_those_of_torch() -> None:
    """For many random calls: torch chooses the fused kernel exactly if nothing excludes it."""
    seeds = random.SystemRandom().sample(range(1 << 32), 400)
    seen = {"fused": 0, "math": 0}
    for seed in seeds:
        arguments, (q, k, v, mask) = _random_call(seed)
        chosen = torch._fused_sdp_choice(
            q,
            k,
            v,
            mask,
            arguments.dropout_p,
            arguments.is_causal,
            enable_gqa=arguments.enable_gqa,
        )
        is_fused = chosen == 1
        seen["fused" if is_fused else "math"] += 1
        reasons = exclusions("flash", arguments).sure
        assert is_fused == (not reasons), (seed, reasons, arguments)
    assert min(seen.values()) > 40, seen


@pytest.mark.parametrize(
    ("arch", "backend", "facts", "arguments", "what"),
    [
        ("sm_75", "flash", {}, {}, "flash: compute capability"),
        ("sm_90", "flash", {"dtype": "float32"}, {}, "flash: dtype of q, k, v"),
        ("sm_90", "efficient", {"dtype": "float64"}, {}, "efficient: dtype of q, k, v"),
        ("sm_75", "efficient", {}, {}, "efficient: dtype of q, k, v"),
        ("sm_90", "cudnn", {}, {"dropout_p": 0.1}, "cudnn: dropout_p"),
        ("sm_90", "cudnn", {"requires_grad": True}, {"dropout_p": 0.1}, "cudnn: dropout_p"),
    ],
)
def test_constraints_of_cuda(
    arch: str, backend: str, facts: dict[str, object], arguments: dict[str, float], what: str
) -> None:
    query = tensor(1, 4, 64, 64, **{"dtype": "bfloat16", "device": "cuda", **facts})
    call = AttentionArguments(query=query, key=query, value=query, arch=arch, **arguments)
    assert what in {e.what for e in exclusions(backend, call).sure}  # type: ignore[arg-type]


def test_training_large_heads_on_small_chips() -> None:
    query = _half(1, 4, 64, 224, requires_grad=True)
    small = AttentionArguments(query=query, key=query, value=query, arch="sm_120")
    large = AttentionArguments(query=query, key=query, value=query, arch="sm_90")
    quiet = AttentionArguments(
        query=query, key=query, value=query, arch="sm_120", settings={"grad_enabled": "False"}
    )
    assert exclusions("flash", small).sure
    assert not exclusions("flash", large).sure
    assert not exclusions("flash", quiet).sure


def test_causal_with_fewer_queries_than_keys_on_cuda() -> None:
    call = AttentionArguments(
        query=_half(1, 4, 1, 64), key=_half(1, 4, 9, 64), value=_half(1, 4, 9, 64), is_causal=True
    )
    assert "lengths" in exclusions("flash", call).sure[0].what
    assert not exclusions("efficient", call).sure


def test_findings_of_one_rule_at_one_line_are_one() -> None:
    query, value = tensor(2, 4, 64, 48), tensor(2, 4, 64, 32)
    seen = trace(
        product(tensor(64, 64), tensor(64, 64)),
        functions=[attention(query, value=value), attention(query, dropout_p=0.5)],
    )
    found = only(seen, "sdpa-math-path")
    assert found.calls == 8
    assert "1 more" in found.title
    assert found.time_share == 1.0


def test_rank_is_named_where_there_are_several() -> None:
    machine = Machine(label="a CPU", arch="x86_64")
    seen = trace(
        functions=[attention(tensor(2, 4, 8, 8), dropout_p=0.1, rank=1)],
        machine=machine,
        processes=2,
    )
    assert only(seen, "sdpa-math-path").rank == 1
