"""Dense products in bf16, in whole tiles and in even shares of their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.dense_forms import dense_size
from hal_kernels.gemm.stream_k_limits import StreamK
from hal_kernels.gemm.stream_k_variants import sizes_of
from kernel_peers.launches import Launch, Own, Problem, TileBytes

DEPTH = 7168
_HOPPER_PATH = "flag_gems/runtime/backend/_nvidia/hopper/ops/mm.py"
_FORMULA = (
    "per tile of the output: its rows and columns x K x 2 B; 2 B an output; rows beyond the last "
    "are not counted"
)


def _bf16(_: Target) -> str:
    return "bfloat16"


def product_bytes(rows: int, columns: int, column_bytes: int) -> TileBytes:
    """Of so many rows of DEPTH values in two bytes; column_bytes: of one column of the weight."""

    def moves(tiles: Mapping[str, Any]) -> int:
        most, wide = int(tiles["BLOCK_M"]), int(tiles["BLOCK_N"])
        high = min(most, rows)
        count = -(-rows // most) * -(-columns // wide)
        return count * (high * DEPTH * 2 + wide * column_bytes) + rows * columns * 2

    return moves


def _general(rows: int, columns: int) -> Mapping[str, Any]:
    """A linear layer's weight, [columns, DEPTH], transposed."""
    return {
        **dict.fromkeys("ABC", "*bf16"),
        "M": rows,
        "N": columns,
        "K": DEPTH,
        **dict.fromkeys(("stride_am", "stride_bn"), DEPTH),
        **dict.fromkeys(("stride_ak", "stride_bk", "stride_cn"), 1),
        "stride_cm": columns,
        "GROUP_M": 8,
    }


def _listed(*tiles: tuple[int, int, int, int, int]) -> list[Mapping[str, Any]]:
    """Rows, columns, depth, stages and warps as the peer's lists of tiles have them."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps")
    return [dict(zip(names, one, strict=True)) for one in tiles]


# Of the lists in tune_configs.yaml: the tiles of our output, and of few rows.
_SQUARE = ((128, 128, 32, 5, 8), (128, 128, 32, 4, 8), (128, 128, 64, 3, 8))
_FEW = ((16, 64, 256, 4, 4), (16, 64, 64, 5, 2), (16, 64, 128, 4, 2))
# Twice as wide or high, which reads a quarter less; not in the list of AMD.
_TALL = tuple(
    (high, wide, depth, stages, 8)
    for high, wide in ((128, 256), (256, 128))
    for depth in (64, 32)
    for stages in (3,)
)


def _with_descriptors(
    tiles: Sequence[tuple[int, int, int, int, int]],
) -> list[Mapping[str, Any]]:
    """The tiles with what they load and store through descriptors made on the host."""
    return [
        {
            **one,
            "a_desc": f"tensordesc<bf16[{one['BLOCK_M']}, {one['BLOCK_K']}]>",
            "b_desc": f"tensordesc<bf16[{one['BLOCK_N']}, {one['BLOCK_K']}]>",
            "c_desc": f"tensordesc<bf16[{one['BLOCK_M']}, {one['BLOCK_N']}]>",
        }
        for one in _listed(*tiles)
    ]


def _described(rows: int, columns: int) -> Mapping[str, Any]:
    shared = {k: v for k, v in _general(rows, columns).items() if k not in "ABC"}
    return {
        **shared,
        "A_ROW_MAJOR": True,
        "B_ROW_MAJOR": False,
        "dtype": "bfloat16",
        "enable_warp_specialization": True,
    }


_AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
_ELSEWHERE = dict.fromkeys(
    ("sm_80", "sm_89", "sm_100", "sm_103", "sm_120", *_AMD),
    "of its Hopper backend",
)
_ON_HOPPER = {"sm_90": "its Hopper backend takes another kernel, below"}


def _mm(peer: str, rows: int, columns: int, tiles: Any, note: str, **more: Any) -> Launch:
    moves = product_bytes(rows, columns, DEPTH * 2)
    return Launch(
        peer=peer,
        wheel="flag_gems",
        path=more.pop("path", "flag_gems/ops/mm.py"),
        function=more.pop("function", "mm_kernel_general"),
        arguments=lambda _: more.get("arguments", _general)(rows, columns),
        configurations=lambda _: tiles,
        moves=moves,
        source="general_mm, tuned",
        note=note,
        skips=more.get("skips", _ON_HOPPER),
    )


def _hopper(rows: int, columns: int, tiles: Any, note: str) -> Launch:
    return _mm(
        "FlagGems Hopper", rows, columns, _with_descriptors(tiles), note,
        path=_HOPPER_PATH, function="mm_kernel_general_host_tma", arguments=_described,
        skips=_ELSEWHERE,
    )  # fmt: skip


_ROWS, _COLUMNS = 512, 4096
# Of an architecture there are devices of many sizes, by which the list of a peer is tried and our
# launcher chooses between square and wide tiles.
_ANY_UNITS = 0
_NO_TALL = {
    **_ON_HOPPER,
    **dict.fromkeys(_AMD, "not in its list of tiles for AMD"),
}
_PREFILL = Problem(
    name="dense product, prefill",
    what=f"{_ROWS} rows of {DEPTH} by {_COLUMNS} columns, bf16, whole tiles; ours as by default "
    "where the number of multiprocessors is not known",
    dtype=_bf16,
    own=Own(
        kernel="gemm.dense",
        config=lambda target: dense_size(
            target, "gemm", _ANY_UNITS, rows=_ROWS, features=_COLUMNS, k=DEPTH,
            has_wide=True,
        ),
        dtype=_bf16,
        moves=product_bytes(_ROWS, _COLUMNS, DEPTH * 2),
    ),
    formula=_FORMULA,
    peers=(
        _mm("FlagGems", _ROWS, _COLUMNS, _listed(*_SQUARE), "of its list the tiles of 128x128"),
        _mm(
            "FlagGems 128x256", _ROWS, _COLUMNS, _listed(*_TALL),
            "of its list the tiles of 128x256 and 256x128", skips=_NO_TALL,
        ),
        _hopper(
            _ROWS, _COLUMNS,
            [(128, 128, 64, stages, 8) for stages in (2, 3, 4)],
            "of its list the tiles of 128x128x64 by 8 warps",
        ),
    ),
)  # fmt: skip

_FEW_ROWS, _FEW_COLUMNS = 16, 36864  # more tiles than programs: nobody splits K
_DECODE = Problem(
    name="dense product, decode",
    what=f"{_FEW_ROWS} rows of {DEPTH} by {_FEW_COLUMNS} columns, bf16",
    dtype=_bf16,
    own=Own(
        kernel="gemm.dense",
        config=lambda _: "small",
        dtype=_bf16,
        moves=product_bytes(_FEW_ROWS, _FEW_COLUMNS, DEPTH * 2),
    ),
    formula=_FORMULA,
    peers=(
        _mm(
            "FlagGems", _FEW_ROWS, _FEW_COLUMNS, _listed(*_FEW), "of its list the tiles of 16 rows"
        ),
        _hopper(
            _FEW_ROWS, _FEW_COLUMNS,
            [(32, 64, 64, stages, 4) for stages in (2, 3, 4)],
            "of its list the tiles of 32x64x64 by 4 warps: none has 16 rows",
        ),
    ),
)  # fmt: skip

_SHARED_COLUMNS, _PROGRAMS = 1024, 108  # multiprocessors of the only device that it was tuned for


def _share_bytes(tiles: Mapping[str, Any], *, keeps_first: bool) -> int:
    """Of tiles whose steps are shared out evenly. keeps_first: the program with the first steps of
    a tile adds the other parts to its own, which it never writes."""
    high, wide, depth = (int(tiles[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    steps = DEPTH // depth
    count = _ROWS // high * (_SHARED_COLUMNS // wide)
    share, more = divmod(count * steps, _PROGRAMS)
    begins = [program * share + min(program, more) for program in range(_PROGRAMS + 1)]
    cuts = sorted({*begins, *(tile * steps for tile in range(count + 1))})
    parts = sum(
        end - begin < steps and not (keeps_first and begin % steps == 0)
        for begin, end in pairwise(cuts)
    )
    operands = count * steps * (high + wide) * depth * 2
    return operands + parts * high * wide * 4 * 2 + _ROWS * _SHARED_COLUMNS * 2


def _shared_config(target: Target) -> str:
    """The tiles that our launcher shares out over so many programs."""
    request = GemmRequest(
        n=_SHARED_COLUMNS, k=DEPTH, dtype="bfloat16", weight_format=FORMATS["bfloat16"],
        tokens=TokenRange(_ROWS, _ROWS),
    )  # fmt: skip
    sizes = frozenset(sizes_of(target, "gemm", ""))
    found = StreamK(request, target, _PROGRAMS, sizes).share(_ROWS)
    if found is None:
        raise LookupError(f"stream-K: required a problem that is shared out, found {request.label}")
    return found.config


_STREAM_K = Problem(
    name="dense product, stream-K",
    what=f"{_ROWS} rows of {DEPTH} by {_SHARED_COLUMNS} columns, bf16, over {_PROGRAMS} programs",
    dtype=_bf16,
    own=Own(
        kernel="gemm.stream_k",
        config=_shared_config,
        dtype=_bf16,
        moves=lambda tiles: _share_bytes(tiles, keeps_first=False),
    ),
    formula="as for a product, and the parts of tiles that several programs share x 4 B, written "
    "and read",
    skips=dict.fromkeys(
        ("sm_90", "sm_100", "sm_103", "sm_120", *_AMD),
        "FlagGems shares out steps on sm_8x alone",
    ),
    peers=(
        Launch(
            peer="FlagGems",
            wheel="flag_gems",
            path="flag_gems/ops/mm_streamk.py",
            function="first_wave_for_bf16",
            arguments=lambda _: {
                **_general(_ROWS, _SHARED_COLUMNS),
                "P": "*fp32",
                "locks": "*i32",
                "iters_per_pid": 16,
                "iters_remaining": 64,
                "iters_per_tile": DEPTH // 128,
                "EVEN_K": True,
            },
            configurations=lambda _: _listed((128, 128, 128, 3, 8)),
            moves=lambda tiles: _share_bytes(tiles, keeps_first=True),
            source="streamk_mm",
            note="the program with a tile's first steps waits for the others; ours ends, and a "
            "second kernel sums, so that no program depends on another that runs",
        ),
    ),
)

PROBLEMS = (_PREFILL, _DECODE, _STREAM_K)
