from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_engine.kv_cache import BlockPool


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """What a sequence does: reuse, allocate, compute, register. Returns its block table."""
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, token_ids)
    table = pool.lookup(hashes, token_ids)
    pool.acquire(table)
    missing = pool.num_blocks_for(len(token_ids)) - len(table)
    taken = pool.allocate(missing, after=table[-1] if table else None)
    assert taken is not None
    hits = len(table)
    table = table + taken
    for index in range(hits, len(token_ids) // pool.block_size):
        pool.register(table[index], index, hashes, token_ids)
    return table


def test_blocks_come_in_a_row_when_possible() -> None:
    pool = BlockPool(16, 4)
    a = pool.allocate(3)
    b = pool.allocate(2)
    assert (a, b) == ([0, 1, 2], [3, 4])
    assert pool.allocate(2, after=4) == [5, 6]
    pool.release([3, 4])
    assert pool.allocate(1, after=2) == [3]
    pool.check_invariants([[0, 1, 2], [3], [5, 6]])


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(5) is None
    assert pool.num_available == 4
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_prefix_is_reused_up_to_the_first_difference() -> None:
    pool = BlockPool(16, 4)
    first = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = fill(pool, [1, 2, 3, 4, 5, 6, 0, 8, 9])
    assert second[0] == first[0]
    assert second[1] != first[1]
    pool.check_invariants([first, second])
    # The same block content behind another prefix is another block.
    third = fill(pool, [0, 0, 0, 0, 5, 6, 7, 8])
    assert third[1] not in first


def test_released_blocks_are_found_again_until_evicted() -> None:
    pool = BlockPool(4, 4)
    ids = list(range(12))
    table = fill(pool, ids)
    pool.release(table)
    assert (pool.num_used, pool.num_available) == (0, 4)
    assert fill(pool, ids) == table
    pool.release(table)
    # Under pressure the end of a chain goes before its beginning.
    taken = pool.allocate(2)
    assert taken == [3, table[2]]
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, ids)
    assert pool.lookup(hashes, ids) == table[:2]
    pool.check_invariants([taken])
    pool.reset_prefix_cache()
    assert pool.lookup(hashes, ids) == []
    pool.check_invariants([taken])


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(4, 4)
    old, new = fill(pool, [1] * 4), fill(pool, [2] * 4)
    pool.release(old)
    pool.release(new)
    pool.release(fill(pool, [1] * 4))  # used again
    taken = pool.allocate(3)
    assert taken is not None
    assert set(taken) == {2, 3, new[0]}


def test_a_hash_collision_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(8, 4)

    def collide(hashes: list[bytes], token_ids: list[int]) -> None:
        hashes[:] = [b"%d" % i for i in range(len(token_ids) // 4)]

    monkeypatch.setattr(pool, "extend_hashes", collide)
    table = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    other = fill(pool, [1, 2, 3, 4, 9, 9, 9, 9])
    assert other[0] == table[0]
    assert other[1] != table[1]
    assert not set(fill(pool, [4, 3, 2, 1])) & set(table)


def test_hashes_differ_between_pools_and_depend_on_the_parent() -> None:
    a, b = BlockPool(4, 2), BlockPool(4, 2)
    first: list[bytes] = []
    second: list[bytes] = []
    a.extend_hashes(first, [7, 8, 7, 8])
    b.extend_hashes(second, [7, 8, 7, 8])
    assert len({*first, *second}) == 4  # keyed, and chained


def test_invariants_notice_a_wrong_book() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    assert table is not None
    with pytest.raises(RuntimeError, match="references"):
        pool.check_invariants([])
    with pytest.raises(RuntimeError, match="twice"):
        pool.check_invariants([[0, 0]])


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0)])
def test_empty_cache_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(blocks, size)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 24), size=st.integers(1, 4))
def test_any_history_keeps_the_books(seed: int, num_blocks: int, size: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, size)
    live: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}  # block id -> the whole prefix it stands for
    for _ in range(60):
        if live and rng.random() < 0.45:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            ids = [rng.randrange(2) for _ in range(rng.randrange(1, size * 6))]
            hashes: list[bytes] = []
            pool.extend_hashes(hashes, ids)
            hits = pool.lookup(hashes, ids)
            for i, block_id in enumerate(hits):
                assert content[block_id] == tuple(ids[: (i + 1) * size])
            missing = pool.num_blocks_for(len(ids)) - len(hits)
            if pool.num_available - pool.num_cached_among(hits) < missing:
                continue
            table = fill(pool, ids)
            for i, block_id in enumerate(table):
                content[block_id] = tuple(ids[: (i + 1) * size])
            live.append(table)
        pool.check_invariants(live)
    for table in live:
        pool.release(table)
    pool.check_invariants([])
    assert pool.num_used == 0
    assert pool.allocate(num_blocks) is not None
