"""The pattern of an attention mask: whether it says nothing, or what `is_causal` would say.

Every distinct mask is looked at: one memory with unchanged contents once, however many layers read
it. So many and such large ones; of what is beyond that nothing is said.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hal.auditing.observer_storages import Storages

_MAX_ELEMENTS: Final = 16 << 20
"""Of one mask."""
_MAX_LOOKED_AT: Final = 512 << 20
"""Elements of all masks of an audit."""
_MAX_KNOWN: Final = 4096


class MaskReader:
    """Looks at masks; what it saw is kept while the mask is not written to."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._known: dict[tuple[Any, ...], str] = {}
        self._looked_at = 0
        self.num_passed_over = 0

    def pattern(self, mask: torch.Tensor | None) -> str:
        """ "all-true", "causal" or "" (neither, no mask, or too large a one)."""
        if mask is None or mask.is_nested:
            return ""
        storage = self._storages.of(mask)
        if storage is None:
            return ""
        version = -1 if mask.is_inference() else mask._version
        place = (mask.storage_offset(), mask.shape, mask.stride(), mask.dtype)
        key = (storage.uid, storage.version, version, *place)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:  # masks of long ago
                self._known.clear()
            known = self._known[key] = self._look(mask)
        return known

    def _look(self, mask: torch.Tensor) -> str:
        size = mask.numel()
        if size > _MAX_ELEMENTS or self._looked_at + size > _MAX_LOOKED_AT:
            self.num_passed_over += 1
            return ""
        self._looked_at += size
        return mask_pattern(mask)


def mask_pattern(mask: torch.Tensor) -> str:
    """ "all-true", "causal" or "": of a mask whose last dimensions are queries and keys."""
    if mask.dim() < 2 or mask.device.type == "meta" or mask.is_sparse or not mask.numel():
        return ""
    import numpy

    values = mask.detach().to("cpu")
    values = values if values.dtype is torch.bool else values.float()
    array = values.numpy()
    is_bool = array.dtype == numpy.bool_
    allowed = array if is_bool else array == 0
    if allowed.all():
        return "all-true"
    lower = numpy.tril(numpy.ones(array.shape[-2:], dtype=numpy.bool_))
    if not (allowed == lower).all():
        return ""
    rest = numpy.broadcast_to(~lower, array.shape)
    return "causal" if is_bool or (array[rest] <= -1e4).all() else ""
