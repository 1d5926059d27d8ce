"""Who owns which KV block: reference counts, prefix reuse, eviction.

A block is in exactly one of three states: *free* (no content worth keeping), *cached* (no owner,
but its content can be reused; evicted oldest first when free blocks run out) or *used* (one or more
sequences refer to it). The pool knows ids only; the tensors belong to the model runner.

Prefix reuse: a full block is named by a hash of its token ids and its parent's hash, so equal names
mean an equal prefix from the first token on. The hash is BLAKE2b with a key drawn at start, and a
hit is taken only if the token ids are equal too: a collision must not show one user's text to
another.
"""

from __future__ import annotations

import heapq
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

ROOT = b""  # the parent of a sequence's first block


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"KV cache: at least 1 block of at least 1 token is required, found "
                f"{num_blocks} blocks of {block_size}; give it more memory"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self._hash_key = secrets.token_bytes(32)
        self._ref_counts = [0] * num_blocks
        self._is_free = bytearray(b"\x01" * num_blocks)
        self._num_free = num_blocks
        # A block taken out of order leaves its entry in the heap; _in_heap keeps entries unique.
        self._free_heap = list(range(num_blocks))
        self._in_heap = bytearray(b"\x01" * num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of_hash: dict[bytes, int] = {}
        self._content: dict[int, tuple[bytes, bytes, tuple[int, ...]]] = {}  # hash, parent, ids

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and evictable ones."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence refers to."""
        return self.num_blocks - self.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int]) -> None:
        """Appends to `hashes` the names of the full blocks of `token_ids` that it lacks."""
        size = self.block_size
        for i in range(len(hashes), len(token_ids) // size):
            state = blake2b(hashes[i - 1] if i else ROOT, digest_size=16, key=self._hash_key)
            state.update(array("q", token_ids[i * size : (i + 1) * size]).tobytes())
            hashes.append(state.digest())

    def lookup(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix of full blocks. Takes no reference."""
        found: list[int] = []
        if not self.prefix_reuse:
            return found
        size = self.block_size
        parent = ROOT
        for i, digest in enumerate(hashes):
            block_id = self._block_of_hash.get(digest)
            if block_id is None:
                break
            ids = tuple(token_ids[i * size : (i + 1) * size])
            if self._content[block_id] != (digest, parent, ids):
                break
            found.append(block_id)
            parent = digest
        return found

    def num_cached_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks have no owner, so that acquiring them costs availability."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to blocks that `lookup` found."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` blocks with one reference each, or None (and no change) if there are too few.

        Consecutive ids are preferred, starting behind `after`: neighbouring blocks are neighbouring
        memory.
        """
        if count > self.num_available:
            return None
        taken: list[int] = []
        for _ in range(count):
            after = self._take_one(after)
            taken.append(after)
        return taken

    def _take_one(self, after: int | None) -> int:
        block_id = -1 if after is None else after + 1
        if 0 < block_id < self.num_blocks and self._is_free[block_id]:
            self._is_free[block_id] = 0
            self._num_free -= 1
        elif self._num_free:
            while True:
                block_id = heapq.heappop(self._free_heap)
                self._in_heap[block_id] = 0
                if self._is_free[block_id]:
                    break
            self._is_free[block_id] = 0
            self._num_free -= 1
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        digest, _, _ = self._content.pop(block_id)
        del self._block_of_hash[digest]

    def register(
        self, block_id: int, index: int, hashes: Sequence[bytes], token_ids: Sequence[int]
    ) -> None:
        """Makes a full block of a sequence (its `index`-th), computed by the end of this step,
        available for reuse.

        A second block with the same content stays nameless: one copy is enough.
        """
        digest = hashes[index]
        if not self.prefix_reuse or digest in self._block_of_hash or block_id in self._content:
            return
        size = self.block_size
        ids = tuple(token_ids[index * size : (index + 1) * size])
        self._content[block_id] = (digest, hashes[index - 1] if index else ROOT, ids)
        self._block_of_hash[digest] = block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each. Later blocks are evicted before the ones they build on."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._content:
                self._cached[block_id] = None
                continue
            self._is_free[block_id] = 1
            self._num_free += 1
            if not self._in_heap[block_id]:
                self._in_heap[block_id] = 1
                heapq.heappush(self._free_heap, block_id)

    def reset_prefix_cache(self) -> None:
        """Forgets every block without an owner."""
        while self._cached:
            block_id, _ = self._cached.popitem()
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            self.release([block_id])

    def check_invariants(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError if the books disagree with `owners` (block tables) or each other."""
        expected = [0] * self.num_blocks
        for table in owners:
            if len(set(table)) != len(table):
                raise RuntimeError(f"KV cache: a block table names a block twice: {table}")
            for block_id in table:
                expected[block_id] += 1
        for block_id in range(self.num_blocks):
            self._check_block(block_id, expected[block_id])
        if self._num_free != sum(self._is_free):
            raise RuntimeError(f"KV cache: {self._num_free} free, {sum(self._is_free)} marked")
        for digest, block_id in self._block_of_hash.items():
            if self._content[block_id][0] != digest:
                raise RuntimeError(f"KV cache: block {block_id} is listed under a wrong hash")
        if len(self._content) != len(self._block_of_hash):
            raise RuntimeError("KV cache: contents and hashes are not one to one")

    def _check_block(self, block_id: int, expected: int) -> None:
        count = self._ref_counts[block_id]
        if count != expected:
            raise RuntimeError(
                f"KV cache: block {block_id} has {count} references, {expected} expected"
            )
        states = (count > 0) + self._is_free[block_id] + (block_id in self._cached)
        if states != 1:
            raise RuntimeError(f"KV cache: block {block_id} is in {states} states, 1 required")
        if self._is_free[block_id] and not self._in_heap[block_id]:
            raise RuntimeError(f"KV cache: free block {block_id} can never be handed out")
        if block_id in self._cached and block_id not in self._content:
            raise RuntimeError(f"KV cache: cached block {block_id} has no content")
