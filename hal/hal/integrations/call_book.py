"""The places of one model: written by a rehearsal, read by every call afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hal.errors import RoutingError
from hal.integrations.attention_places import AttentionCall, AttentionPlace, SeenMasks
from hal.integrations.call_places import (
    EmbeddingPlace,
    LinearPlace,
    Place,
    ProductPlace,
    product_sizes,
    widest_of,
)
from hal.integrations.free_calls import (
    ATTENTION,
    EMBEDDING,
    Caller,
    caller,
)
from hal.integrations.free_readings import Reading, read_call

Key = tuple[object, ...]


class CallBook:
    """Finds the place of a call. names: path of every module; own: modules that have a place of
    their own, whose inner functions are theirs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.names: dict[torch.nn.Module, str] = {
            module: name for name, module in model.named_modules()
        }
        self.own: dict[torch.nn.Module, LinearPlace | EmbeddingPlace] = {}
        self.attention: dict[torch.nn.Module, AttentionPlace] = {}
        self.free: dict[Key, LinearPlace | EmbeddingPlace | ProductPlace | AttentionPlace] = {}
        self.refused: dict[Key, str] = {}
        self.guarded: dict[torch.nn.Module, None] = {}
        self.tokens = 1  # of the model's input that is being rehearsed
        self.masks = SeenMasks()
        self._owned = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._transposed = {
            (t.data_ptr(), t.T.shape, t.T.stride()): t for t in self._owned.values() if t.dim() == 2
        }
        self._constants: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sources: dict[int, torch.Tensor] = {}

    def places(self) -> Iterator[Place]:
        """Every place, those of modules first; names are unique."""
        yield from self.own.values()
        yield from self.attention.values()
        yield from self.free.values()

    def record(self, kind: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of the rehearsal: computed as it is, and its place noted."""
        if kind == "convert":
            return self._record_conversion(func, args, kwargs)
        who = caller(self.names)
        own = None if who.module is None else self.own.get(who.module)
        if own is not None:
            rows = args[0].numel() // (args[0].shape[-1] if isinstance(own, LinearPlace) else 1)
            own.widest = widest_of(rows, self.tokens, own.widest)
            return func(*args, **kwargs)
        reading = read_call(kind, func, args, kwargs, self._find_owned)
        key = _key(kind, who, reading)
        if who.module is None:
            self.refused[key] = f"{kind} at {who.location}, outside every module of the model"
        elif reading.refusal:
            self.refused[key] = f"{kind} at {who.location}: {reading.refusal}"
            self.guarded[who.module] = None
        else:
            self._note(key, who.module, reading)
        return func(*args, **kwargs)

    def route(self, kind: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call after routing. Raises RoutingError for one that the rehearsal did not see."""
        if kind == "convert":
            known = self._constants.get(_conversion_key(func, args, kwargs))
            return func(*args, **kwargs) if known is None else known[1]
        who = caller(self.names)
        reading = read_call(kind, func, args, kwargs, self._find_owned)
        key = _key(kind, who, reading)
        place = self.free.get(key)
        if place is None:
            if key in self.refused:
                return func(*args, **kwargs)
            raise RoutingError(
                f"{kind} at {who.location}",
                "a call that the rehearsal saw",
                f"a new one, in {self._name(who.module)}",
                "route with example_inputs that lead to it, or name it in allow",
            )
        return reading.finish(_call(place, reading))

    def note_attention(self, module: torch.nn.Module, call: AttentionCall) -> None:
        """An attention of the rehearsal that came through transformers' interface."""
        place = self.attention.get(module)
        if place is None:
            name = f"{self._name(module)}.attention"
            place = self.attention[module] = AttentionPlace(name=name, first=call)
        self._note_attention(place, call)

    def _note_attention(self, place: AttentionPlace, call: AttentionCall) -> None:
        place.note(call)
        rows = call.q.shape[0] * call.q.shape[2]
        place.widest = widest_of(rows, self.tokens, place.widest)

    def _note(self, key: Key, module: torch.nn.Module, reading: Reading) -> None:
        self.guarded[module] = None
        place = self.free.get(key)
        if place is None:
            place = self.free[key] = self._new(module, reading)
        if isinstance(place, AttentionPlace) and reading.attention is not None:
            self._note_attention(place, reading.attention)
        elif isinstance(place, ProductPlace):
            a, b = reading.operands
            rows, n, k = product_sizes(a, b, reading.equation)
            place.sizes.add((n, k))
            place.widest = widest_of(rows, self.tokens, place.widest)
        elif isinstance(place, LinearPlace):
            x = reading.operands[0]
            place.widest = widest_of(x.numel() // x.shape[-1], self.tokens, place.widest)
        elif isinstance(place, EmbeddingPlace):
            place.widest = widest_of(reading.operands[0].numel(), self.tokens, place.widest)

    def _new(
        self, module: torch.nn.Module, reading: Reading
    ) -> LinearPlace | EmbeddingPlace | ProductPlace | AttentionPlace:
        name = self._free_name(module, reading.kind)
        if reading.kind == ATTENTION and reading.attention is not None:
            return AttentionPlace(name=name, first=reading.attention)
        if reading.weight is not None and reading.matrix is not None:
            source = self._sources.get(id(reading.weight), reading.weight)
            if reading.kind == EMBEDDING:
                return EmbeddingPlace(name=name, weight=reading.matrix)
            return LinearPlace(name=name, weight=reading.matrix, bias=reading.bias, source=source)
        return ProductPlace(name=name, dtype=reading.operands[0].dtype, equation=reading.equation)

    def _free_name(self, module: torch.nn.Module, kind: str) -> str:
        """The module's path and the kind, with a number where a module has several."""
        stem = f"{self._name(module)}.{kind}"
        taken = {place.name for place in (*self.free.values(), *self.attention.values())}
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        return name

    def _name(self, module: torch.nn.Module | None) -> str:
        if module is None:
            return "no module of the model"
        return self.names.get(module) or type(module).__name__

    def _find_owned(self, tensor: Any) -> torch.Tensor | None:
        """See `free_readings.FindOwned`; a converted parameter counts as the model's."""
        if not isinstance(tensor, torch.Tensor):
            return None
        if id(tensor) in self._owned or id(tensor) in self._sources:
            return tensor
        if tensor.dim() != 2:
            return None
        return self._transposed.get((tensor.data_ptr(), tensor.shape, tensor.stride()))

    def _record_conversion(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A parameter in another dtype, made anew at each call: from now on made once."""
        key = _conversion_key(func, args, kwargs)
        if key in self._constants:
            return self._constants[key][1]
        result = func(*args, **kwargs)
        if (
            isinstance(result, torch.Tensor)
            and id(args[0]) in self._owned
            and result is not args[0]
        ):
            self._constants[key] = (args[0], result)
            self._sources[id(result)] = args[0]
        return result

    def keep_needed_constants(self) -> None:
        """Forgets converted parameters that no product uses: the model makes them as before."""
        used = {id(p.weight) for p in self.free.values() if isinstance(p, LinearPlace)}
        used |= {id(p.weight._base) for p in self.free.values() if isinstance(p, LinearPlace)}
        dropped = [key for key, (_, made) in self._constants.items() if id(made) not in used]
        for key in dropped:
            self._sources.pop(id(self._constants.pop(key)[1]), None)


def _key(kind: str, who: Caller, reading: Reading) -> Key:
    weight = 0 if reading.weight is None else id(reading.weight)
    return kind, id(who.module), who.lines, weight


def _conversion_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
    rest = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args[1:])
    named = tuple(sorted((k, str(v)) for k, v in kwargs.items() if not isinstance(v, torch.Tensor)))
    return id(args[0]), func, tuple(map(str, rest)), named


def _call(
    place: LinearPlace | EmbeddingPlace | ProductPlace | AttentionPlace, reading: Reading
) -> torch.Tensor:
    if isinstance(place, AttentionPlace):
        if reading.attention is None:
            raise RoutingError(place.name, "an attention", reading.kind, "report it")
        return place.call(reading.attention)
    if isinstance(place, ProductPlace):
        return place.call(*reading.operands)
    return place.call(reading.operands[0])
