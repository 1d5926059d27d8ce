"""Which calls compute again what was computed, and which go on with the tensor of the last one."""

from __future__ import annotations

from typing import Final

from hal.auditing.observer_facts import ArgumentFacts
from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_sums import OpEntry, ThreadSums

_MAX_SEEN_CALLS: Final = 200_000
_MAX_PRODUCTS_BETWEEN: Final = 6
_PRODUCTS: Final = frozenset({"gemm", "convolution", "attention"})


class ReuseReader:
    """Of all threads: a call that another thread made before is a repeat as well."""

    def __init__(self) -> None:
        self._seen_calls: dict[int, None] = {}

    def note(self, sums: ThreadSums, entry: OpEntry, info: OpInfo, before: ArgumentFacts) -> None:
        """Counts a call among the repeats or the shared inputs of its entry."""
        if info.op_class in _PRODUCTS:
            sums.num_products += 1
        identity = before.identity
        is_repeat = False
        if identity is not None:
            if identity in self._seen_calls:
                is_repeat = True
                entry.repeats += 1
            else:
                self._remember(identity)
        variable = before.first_variable
        if variable is None:
            return
        # Layers that all read one tensor (an encoder's result) have more products between them
        # than a loop has.
        place = (info, entry.stack)
        last = sums.last_storage.get(place)
        sums.last_storage[place] = (variable, sums.num_products)
        if last is None or is_repeat or last[0] != variable:
            return
        entry.shared_inputs += sums.num_products - last[1] <= _MAX_PRODUCTS_BETWEEN

    def _remember(self, identity: int) -> None:
        seen = self._seen_calls
        if len(seen) >= _MAX_SEEN_CALLS:
            for old in list(seen)[: _MAX_SEEN_CALLS // 2]:
                seen.pop(old, None)
        seen[identity] = None
