"""Rows of latent and index caches: every byte where the format says, and back."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.kv_formats import KV_FORMATS, pack_rows, read_rows, slots_of, unpack_rows, write_rows
from hal.ops.kv_write import KvWriteRequest
from op_inputs import UNTIMED, normal, paged

PACKED = [name for name, form in KV_FORMATS.items() if not form.is_plain]
# Bytes of a row, from the facts of each format: values, tail, scales, padding.
ROW_BYTES = {
    "fp8_656": 512 + 4 * 4 + 64 * 2,
    "v4_584": 448 + 64 * 2 + 7 + 1,
    "v41_528": 512 + 16,
    "fp4_288": 256 + 32,
    "fp8_132": 128 + 4,
    "fp4_68": 64 + 4,
}


def test_bytes_of_rows_and_pages() -> None:
    assert {name: KV_FORMATS[name].row_bytes(0) for name in PACKED} == ROW_BYTES
    assert KV_FORMATS["bf16"].row_bytes(576) == KV_FORMATS["fp16"].row_bytes(576) == 1152
    assert KV_FORMATS["fp8_656"].page_bytes(64) == 64 * 656
    for block in (1, 2, 64, 256):
        page = KV_FORMATS["v4_584"].page_bytes(block)
        assert page % 576 == 0
        assert block * 584 <= page < block * 584 + 576


def test_bytes_of_a_token_of_whole_models() -> None:
    """The published sums: DeepSeek-V3.2, V4-Flash with either index, V4.1-Flash."""
    v4, index = ROW_BYTES["v4_584"], ROW_BYTES["fp8_132"]
    assert 61 * (KV_FORMATS["fp8_656"].row_bytes(576) + index) == 48_068
    assert round(21 * (v4 + index) / 4 + 20 * v4 / 128) == 3_850
    assert round(21 * (v4 + ROW_BYTES["fp4_68"]) / 4 + 20 * v4 / 128) == 3_514
    assert 2.5 * (ROW_BYTES["fp4_288"] + ROW_BYTES["fp4_68"]) == 890


def test_a_row_of_fp8_656_byte_by_byte() -> None:
    row = torch.zeros(1, 576)
    row[0, 0:128] = 448.0  # scale 1, code 0x7e
    row[0, 128] = -896.0  # scale 2, code 0xfe
    row[0, 256:384] = 0.5  # scale 0.5 / 448, code 0x7e
    row[0, 512:576] = torch.arange(64.0)
    packed = pack_rows("fp8_656", row)[0]
    assert packed[:128].tolist() == [0x7E] * 128
    assert packed[128:256].tolist() == [0xFE] + [0] * 127
    assert packed[256:384].tolist() == [0x7E] * 128
    assert packed[384:512].tolist() == [0] * 128
    scales = struct.unpack("<4f", bytes(packed[512:528].tolist()))
    assert scales == (1.0, 2.0, float(torch.tensor(0.5) / 448), 1.0)
    tail = torch.tensor(packed[528:].tolist(), dtype=torch.uint8).view(torch.bfloat16)
    assert tail.tolist() == list(range(64))


def test_a_row_of_v4_584_byte_by_byte() -> None:
    row = torch.zeros(1, 512)
    row[0, 0:64] = 448.0  # 2^0 = code 127
    row[0, 64:128] = 449.0  # 2^1, 224.5 rounds to 224 = 0x76
    row[0, 128:192] = 7.0  # 7 / 448 = 2^-6, code 121
    row[0, 448:] = -1.5
    packed = pack_rows("v4_584", row)[0]
    assert packed[:64].tolist() == [0x7E] * 64
    assert packed[64:128].tolist() == [0x76] * 64
    assert packed[128:192].tolist() == [0x7E] * 64
    assert packed[448:576].tolist() == [0xC0, 0xBF] * 64
    assert packed[576:].tolist() == [127, 128, 121, 127, 127, 127, 127, 0]


def test_rows_of_four_bits_byte_by_byte() -> None:
    row = torch.zeros(1, 128)
    row[0, :4] = torch.tensor([6.0, -3.0, 0.25, 0.3])
    row[0, 32:34] = torch.tensor([12.0, -1.0])  # scale 2
    packed = pack_rows("fp4_68", row)[0]
    assert packed[:2].tolist() == [0xD7, 0x10]
    assert packed[16:17].tolist() == [0x97]  # 6 and -0.5: codes 7 and 9
    assert packed[64:].tolist() == [127, 128, 127, 127]
    wide = torch.zeros(1, 512)
    wide[0, 16:18] = torch.tensor([9.0, 1.5])  # scale 1.5 = 0x3c: 6 and 1
    packed = pack_rows("fp4_288", wide)[0]
    assert packed[8:9].tolist() == [0x27]
    assert packed[256:260].tolist() == [0x38, 0x3C, 0x38, 0x38]


@pytest.mark.parametrize("name", PACKED)
def test_rows_read_back_within_half_a_step(rng: torch.Generator, name: str) -> None:
    kind = KV_FORMATS[name]
    rows = normal(rng, 9, kind.dim, dtype="float32") * torch.logspace(-6, 6, 9)[:, None]
    rows[4] = 0.0
    packed = pack_rows(name, rows)
    assert packed.shape == (9, ROW_BYTES[name])
    assert packed.dtype == torch.uint8
    back = unpack_rows(name, packed)
    for column in range(0, kind.quantized_dim, kind.group_size):
        part = slice(column, column + kind.group_size)
        peak = rows[:, part].abs().amax(dim=1, keepdim=True)
        step = (
            rows[:, part].abs() * 2.0**-4 + peak * 2.0**-8
            if kind.element == "fp8_e4m3fn"
            # half of the widest step, 4 to 6, with a scale up to twice what is needed
            else peak * (2.0 / 6.0 if kind.scale == "ue8m0" else 1.1 / 6.0)
        )
        # e4m3 scales end at 448 and 2^-9, beyond which rows of these magnitudes saturate or vanish.
        is_fair = (peak < 448 * 6) & (peak > 6 * 2.0**-6) if kind.scale == "e4m3" else peak >= 0
        assert ((back[:, part] - rows[:, part]).abs() <= step)[is_fair[:, 0]].all()
    tail = rows[:, kind.quantized_dim :]
    assert torch.equal(back[:, kind.quantized_dim :], tail.bfloat16().float())
    assert torch.equal(back[4], torch.zeros(kind.dim))
    again = unpack_rows(name, pack_rows(name, back))
    if kind.scale == "ue8m0":
        assert torch.equal(again, back)


@pytest.mark.parametrize("name", PACKED)
def test_rows_of_a_value_that_is_not_finite_read_back_as_nan(name: str) -> None:
    kind = KV_FORMATS[name]
    rows = torch.ones(2, kind.dim)
    rows[0, 3] = float("nan")
    rows[1, kind.quantized_dim - 1] = float("inf")
    back = unpack_rows(name, pack_rows(name, rows))
    assert back[0, : kind.group_size].isnan().all()
    assert back[1, kind.quantized_dim - kind.group_size : kind.quantized_dim].isnan().all()
    others = back[0, kind.group_size :]
    assert others.isfinite().all()


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_pages_hold_each_row_once_and_leave_the_rest_alone(
    rng: torch.Generator, name: str, block_size: int
) -> None:
    dim = KV_FORMATS[name].dim or 40
    rows = normal(rng, 7, dim, dtype="bfloat16").float()
    plain = torch.float16 if name == "fp16" else torch.bfloat16
    cache = torch.full((5, block_size, dim), -7.0, dtype=plain)
    if not KV_FORMATS[name].is_plain:
        page = KV_FORMATS[name].page_bytes(block_size)
        cache = torch.randint(0, 256, (7, page), generator=rng, dtype=torch.uint8)
    before = cache.clone()
    count = min(7, len(cache) * block_size)
    slots = torch.randperm(len(cache) * block_size, generator=rng)[:count]
    write_rows(name, cache, block_size, slots, rows[:count])
    want = rows[:count] if name == "bf16" else unpack_rows(name, pack_rows(name, rows[:count]))
    assert torch.equal(read_rows(name, cache, block_size, slots), want)
    size = KV_FORMATS[name].row_bytes(dim)
    changed = (cache.view(torch.uint8) != before.view(torch.uint8)).sum()
    assert int(changed) <= count * size
    written = cache.clone()
    for slot, row in zip(slots.tolist(), rows, strict=False):
        write_rows(name, written, block_size, torch.tensor([slot]), row[None])
    assert torch.equal(written.view(torch.uint8), cache.view(torch.uint8))


def test_pages_of_two_parts_have_all_values_before_all_scales() -> None:
    """FlashMLA's and DeepGEMM's page: bytes by hand for a page of three rows."""
    for name, data in (("v4_584", 576), ("fp8_132", 128), ("fp4_68", 64)):
        kind = KV_FORMATS[name]
        cache = torch.zeros((1, kind.page_bytes(3)), dtype=torch.uint8)
        rows = torch.arange(1.0, 4.0)[:, None].expand(3, kind.dim)
        write_rows(name, cache, 3, torch.arange(3), rows)
        packed = pack_rows(name, rows)
        for row in range(3):
            assert torch.equal(cache[0, row * data : (row + 1) * data], packed[row, :data])
            scales = cache[0, 3 * data :][row * kind.scale_bytes : (row + 1) * kind.scale_bytes]
            assert torch.equal(scales, packed[row, data:])


@UNTIMED
@given(
    block_size=st.integers(1, 70),
    table=st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True),
    data=st.data(),
)
def test_slots_are_block_times_size_plus_offset(
    block_size: int, table: list[int], data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, len(table) * block_size - 1), max_size=5))
    got = slots_of(torch.tensor(table, dtype=torch.int32), torch.tensor(positions), block_size)
    want = [table[p // block_size] * block_size + p % block_size for p in positions]
    assert got.tolist() == want


@pytest.mark.parametrize("name", KV_FORMATS)
def test_kv_write_of_rows(rng: torch.Generator, name: str) -> None:
    dim = KV_FORMATS[name].dim or 576
    request = KvWriteRequest(
        num_kv_heads=1,
        head_dim=dim,
        v_head_dim=0,
        block_size=4,
        dtype="bfloat16",
        kv_dtype="uint8",
        kv_format=name,
    )
    rows = normal(rng, 6, dim, dtype="bfloat16")
    plain = "float16" if name == "fp16" else "bfloat16"
    cache, table = paged(rng, name, [rows.new_zeros(6, dim).float()], 4, dtype=plain)
    slots = slots_of(table[0], torch.tensor([3, 1, 0, 5]), 4)
    untouched = slots_of(table[0], torch.tensor([2, 4]), 4)
    CATALOGUE["kv_write"].reference(request)(rows[:4], cache, slots)
    want = unpack_rows(name, pack_rows(name, rows[:4].float()))
    assert torch.equal(read_rows(name, cache, 4, slots), want)
    assert torch.equal(read_rows(name, cache, 4, untouched), torch.zeros(2, dim))
    size = ROW_BYTES.get(name, 2 * dim)
    assert CATALOGUE["kv_write"].bytes_moved(request, 6) == rows.nbytes + 6 * (size + 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "fp8"}, "kv_format one of"),
        ({"num_kv_heads": 2}, "num_kv_heads 1 and v_head_dim 0"),
        ({"v_head_dim": 512}, "num_kv_heads 1 and v_head_dim 0"),
        ({"head_dim": 512}, "head_dim 576 for fp8_656"),
    ],
)
def test_impossible_writes_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "num_kv_heads": 1,
        "head_dim": 576,
        "v_head_dim": 0,
        "block_size": 4,
        "dtype": "bfloat16",
        "kv_dtype": "uint8",
        "kv_format": "fp8_656",
    }
    with pytest.raises(RequestError, match=message):
        KvWriteRequest(**(arguments | changes))  # type: ignore[arg-type]  # what is refused
