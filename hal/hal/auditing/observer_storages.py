"""Where tensors come from: dtypes and devices that a memory's contents were made from.

Kept per untyped storage. A weak reference of torch's own keeps the address of a storage from being
used again while it is known here, without keeping its memory.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

_SWEEP_AT: Final = 4096
_Tensor: Final = torch.Tensor
_EMPTY: Final[frozenset[Any]] = frozenset()


class StorageFacts:
    """One memory. uid: its number in this audit. version: how often seen ops wrote to it. literal:
    the number that it was made of, if that is all there is in it."""

    __slots__ = ("devices", "dtypes", "is_constant", "literal", "reference", "uid", "version")

    def __init__(self, uid: int, reference: Any, is_constant: bool) -> None:
        self.uid = uid
        self.reference = reference
        self.is_constant = is_constant
        self.dtypes: frozenset[torch.dtype] = _EMPTY
        self.devices: frozenset[str] = _EMPTY
        self.version = 0
        self.literal: Any = None


class Storages:
    """All memories that an audit has seen and that are still there."""

    def __init__(self) -> None:
        self._facts: dict[int, StorageFacts] = {}
        self._lock = threading.Lock()
        self._next_uid = 0
        self._sweep_at = _SWEEP_AT

    def note_existing(self) -> None:
        """Marks the memory of every tensor that there is now as older than the audit."""
        plain = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
        self.note_constants([thing for thing in gc.get_objects() if type(thing) in plain])

    def note_constants(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks tensors (parameters, buffers) as constant, unless an op has written to them."""
        for tensor in tensors:
            facts = self.of(tensor)
            if facts is not None and facts.version == 0 and not tensor.grad_fn:
                facts.is_constant = True

    def of(self, tensor: torch.Tensor) -> StorageFacts | None:
        """What is known of a tensor's memory; None for one that has none (sparse, a wrapper)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ReferenceError):
            return None
        known = self._facts.get(storage._cdata)
        return known if known is not None else self._add(tensor, storage)

    def _add(self, tensor: torch.Tensor, storage: Any) -> StorageFacts:
        with self._lock:
            key = storage._cdata
            known = self._facts.get(key)
            if known is not None:
                return known
            if len(self._facts) >= self._sweep_at:
                self._sweep()
            self._next_uid += 1
            # Torch asks the instance whether it is a parameter, which takes its time.
            is_parameter = type(tensor) is not _Tensor and isinstance(tensor, torch.nn.Parameter)
            facts = StorageFacts(self._next_uid, storage._weak_ref(), is_parameter)
            self._facts[key] = facts
            return facts

    def _sweep(self) -> None:
        """Forgets what has been freed; addresses may be used again from here on."""
        expired = torch.UntypedStorage._expired
        gone = [key for key, facts in self._facts.items() if expired(facts.reference)]
        for key in gone:
            self._release(self._facts.pop(key))
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._facts))

    @staticmethod
    def _release(facts: StorageFacts) -> None:
        release: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
        release(facts.reference)

    def forget_lock(self) -> None:
        """After a fork: the thread that may have held it is the parent's."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Gives all weak references back."""
        with self._lock:
            for facts in self._facts.values():
                self._release(facts)
            self._facts.clear()

    def note_call(
        self,
        outputs: list[torch.Tensor],
        sources: list[StorageFacts],
        written: list[StorageFacts],
        *,
        carries: bool,
        constant: bool,
        random: bool,
    ) -> None:
        """An op ran. carries: its results have its inputs' values in another form, so that their
        origins are its origins. constant: made of constants, they are constants. random: what it
        writes is none."""
        for facts in written:
            self.note_write(facts, sources, carries=carries, constant=not random)
        if constant:
            for source in sources:
                if not source.is_constant:
                    constant = False
                    break
        if not (carries or constant):
            return  # a memory of which nothing is known is a new one
        for tensor in outputs:
            made = self.of(tensor)
            # Not the input itself, or a view of it: made is compared by identity.
            if made is None or made in written or made in sources:
                continue
            made.is_constant = constant
            if carries:
                _carry(made, sources)

    def note_literal(self, result: torch.Tensor, value: Any) -> None:
        """A new memory that holds one number."""
        facts = self.of(result)
        if facts is not None:
            facts.literal = ("literal", value)

    def note_write(
        self, facts: StorageFacts, sources: list[StorageFacts], *, carries: bool, constant: bool
    ) -> None:
        """An op wrote into a memory."""
        facts.version += 1
        facts.literal = None
        others = [source for source in sources if source is not facts]
        facts.is_constant = (
            facts.is_constant and constant and all(source.is_constant for source in others)
        )
        if carries:
            _carry(facts, others)


def _carry(facts: StorageFacts, sources: list[StorageFacts]) -> None:
    """What the sources were made from."""
    for source in sources:
        if not source.dtypes <= facts.dtypes:
            facts.dtypes |= source.dtypes
        if not source.devices <= facts.devices:
            facts.devices |= source.devices
