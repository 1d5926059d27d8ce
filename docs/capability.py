"""The reference of the capability database: devices, architectures, families and the schema."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from hal_capability_db import Architecture, Database, DeviceProfile, Fact, Tell, load_database
from hal_capability_db.cli.listing import Section
from hal_capability_db.quantities import value_text
from hal_capability_db.schema import (
    ArchitectureEntry,
    DeviceEntry,
    FamilyEntry,
    LinkEntry,
)
from hal_capability_db.schema_facts import Sourced
from hal_capability_db.values import FLOAT_RATES, INTEGER_RATES, UNITS
from support import markdown

_NOTHING = "–"


@functools.cache
def _database() -> Database:
    return load_database(())


def devices() -> str:
    """Per family a table of its devices; what is unverified has a question mark."""
    parts = []
    for family in _database().families.values():
        rows = [
            [
                f"`{device.id}`",
                f"`{device.arch}`",
                ", ".join(f"`{number}`" for number in device.pci_device_ids) or _NOTHING,
                _shown(device.memory_bytes),
                _bandwidth(device),
                *(_rate(device, *dtypes) for dtypes in _RATES.values()),
                _shown(device.host_link),
                _fabric(device),
                _shown(device.p2p),
            ]
            for device in _database().devices.values()
            if device.family == family.id
        ]
        if rows:
            columns = ("id", "arch", "PCI", "memory", "bandwidth", *_RATES, "host", "fabric", "P2P")
            parts += [f"### {family.name}", markdown(columns, rows), _device_notes(family.id)]
        else:
            parts += [f"### {family.name}", _NO_PRODUCT.format(vendor=family.vendor)]
    return "\n\n".join(part for part in parts if part)


_NO_PRODUCT = (
    "No product is listed, as none of {vendor}'s has public figures. Its devices are detected all "
    "the same, and told from those that they look like; to plan for one, put what is known of it "
    "into an overlay of your own."
)
_RATES = {
    "FP32": ("float32",),
    "16 bit": ("bfloat16", "float16"),
    "FP8": ("fp8", "mxfp8"),
    "FP4": ("nvfp4", "mxfp4"),
    "INT8": ("int8",),
}


def _rate(device: DeviceProfile, *dtypes: str) -> str:
    for dtype in dtypes:
        fact = device.peak.get(dtype)
        if fact is not None and fact.value is not None:
            return f"{fact.value / 1e12:.4g}" + _mark(fact)
    for dtype in dtypes:
        fact = device.measured.get(dtype)
        if fact is not None and fact.value is not None:
            return f"{fact.value / 1e12:.4g} measured" + _mark(fact)
    return _NOTHING


def _bandwidth(device: DeviceProfile) -> str:
    measured = device.measured.get("memory_bandwidth")
    if device.memory_bandwidth.is_known or measured is None:
        return _shown(device.memory_bandwidth)
    return f"{_shown(measured)} measured"


def _fabric(device: DeviceProfile) -> str:
    """The kind of links, and how many devices they join each to each."""
    group = device.fabric_group
    joined = f" of {_shown(group)}" if group.is_known else ""
    return _shown(device.fabric) + joined


def _device_notes(family: str) -> str:
    noted = [
        f"- `{device.id}`: {device.notes}"
        for device in _database().devices.values()
        if device.family == family and device.notes
    ]
    return "\n".join(noted)


def _shown(fact: Fact[Any]) -> str:
    return value_text(fact.value, fact.unit) + _mark(fact) if fact.is_known else _NOTHING


def _mark(fact: Fact[Any]) -> str:
    return "" if fact.is_verified else "?"


def architectures() -> str:
    """Per architecture: what its matrix units multiply, and the features candidates test."""
    rows = [
        [
            f"`{item.id}`",
            item.name,
            _dtypes(item),
            _shown(item.fp8_kind),
            _shown(item.shared_memory_per_block_bytes),
            _shown(item.warp_size),
            _features(item),
            f"`{item.triton_target.value}`{_mark(item.triton_target)}"
            if item.triton_target.value
            else _NOTHING,
        ]
        for item in sorted(_database().architectures.values(), key=lambda item: item.family)
    ]
    columns = (
        *("arch", "name", "matrix units multiply", "FP8", "shared memory", "warp"),
        *("features", "Triton target"),
    )
    noted = [
        f"- `{item.id}`: {text}"
        for item in _database().architectures.values()
        for text in (item.notes, *(str(note.value) for note in item.accumulation))
        if text
    ]
    return markdown(columns, rows) + "\n\n" + "\n".join(noted)


def _dtypes(item: Architecture) -> str:
    known, claimed = item.matrix_dtypes, item.unverified_matrix_dtypes
    texts = [_shown(known)] if known.value is not None else []
    texts += [f"{value_text(claimed.value)} (all unverified)"] if claimed.value else []
    return "; ".join(texts) or _NOTHING


def _features(item: Architecture) -> str:
    names = ("graph_capture", "tma", "multicast", "wgmma", "tcgen05")
    facts = {name: getattr(item, name) for name in names}
    found = [f"`{name}`{_mark(fact)}" for name, fact in facts.items() if fact.value is True]
    return ", ".join(found) or _NOTHING


def families() -> str:
    """Per family: how it is found, what it answers as, and the names of its software."""
    rows = [
        [
            f"`{item.id}`",
            item.vendor,
            f"`{item.pci_vendor}`" if item.pci_vendor else _NOTHING,
            f"`{item.torch_device}`",
            f"`{item.torch_module}`" if item.torch_module else _NOTHING,
            _codes(item.detection.commands),
            _codes(item.detection.visible_devices_variables),
            f"{item.collectives.name}, `{item.collectives.torch_backend}`"
            if item.collectives.torch_backend
            else f"{item.collectives.name}, name not confirmed",
            f"`{item.triton.target}`" if item.triton.target else _NOTHING,
        ]
        for item in _database().families.values()
    ]
    columns = (
        *("family", "vendor", "PCI", "torch device", "module", "commands"),
        *("visible devices", "collectives", "Triton"),
    )
    return markdown(columns, rows)


_LOOKS = {"": _NOTHING, "cuda": "NVIDIA's `torch.cuda`", "hip": "AMD's `torch.cuda` through HIP"}


def tells() -> str:
    """The signs by which each family is told from the others."""
    rows = [
        [
            f"`{item.id}`",
            _LOOKS[item.detection.masquerades_as],
            "; ".join(map(_tell, item.detection.tells)),
            "; ".join(map(_tell, item.detection.excluded_by)) or _NOTHING,
            " ".join(item.detection.traps),
        ]
        for item in _database().families.values()
    ]
    return markdown(("family", "looks like", "signs", "signs of another", "traps"), rows)


def _tell(tell: Tell) -> str:
    kind = tell.kind.replace("_", " ")
    return f"{kind} `{tell.value}`" + (f" ({tell.note})" if tell.note else "")


def forced() -> str:
    """What other serving stacks force on or off on each family."""
    parts = []
    for item in _database().families.values():
        if item.serving.forced:
            lines = [f"- {line}" for line in item.serving.forced]
            parts.append("\n".join([f"**{item.name}**", "", *lines]))
    return "\n\n".join(parts)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or _NOTHING


def sources() -> str:
    """What every source id stands for."""
    rows = [[f"`{name}`", text] for name, text in _database().sources.items()]
    return markdown(("source", "what it is"), rows)


_SECTIONS: dict[str, type[BaseModel]] = {
    "devices": DeviceEntry,
    "architectures": ArchitectureEntry,
    "families": FamilyEntry,
    "links": LinkEntry,
}


def schema(section: str) -> str:
    """Every key of an entry of a section, with those of the mappings below it."""
    return markdown(("key", "needed", "value", "meaning"), list(_keys(_SECTIONS[section], "")))


def _keys(model: type[BaseModel], prefix: str) -> Iterable[list[str]]:
    shared = Sourced.model_fields.keys()
    for name, field in model.model_fields.items():
        if issubclass(model, Sourced) and prefix and name in shared:
            continue  # stands once, above the tables
        inner = _model_in(field.annotation)
        needed = "yes" if field.is_required() else ""
        kind = _kind(field.annotation, inner)
        yield [f"`{prefix}{name}`", needed, kind, field.description or ""]
        if inner is not None:
            is_list = get_origin(_plain(field.annotation)) is list
            yield from _keys(inner, f"{prefix}{name}{'[]' if is_list else ''}.")


def _plain(annotation: Any) -> Any:
    """The type without `| None`."""
    inner = [part for part in get_args(annotation) if part is not type(None)]
    return inner[0] if type(None) in get_args(annotation) and len(inner) == 1 else annotation


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _kind(annotation: Any, inner: type[BaseModel] | None) -> str:
    plain = _plain(annotation)
    origin = get_origin(plain)
    if inner is not None:
        if origin is list:
            return "list of mappings"
        sourced = "sourced " if issubclass(inner, Sourced) else ""
        return f"{sourced}{'value' if 'value' in inner.model_fields else 'mapping'}"
    if origin is list:
        (item,) = get_args(plain)
        return f"list of {_kind(item, None)}"
    if origin is dict:
        return "mapping"
    if origin is Literal:
        return _codes(map(str, get_args(plain)))
    names = {bool: "true or false", int: "whole number", float: "number"}
    return names.get(plain, "text")


def units() -> str:
    """The units of files, and the range that each value must be in."""
    rows = [
        [f"`{name}`", unit.base, f"{unit.low / unit.factor:g}", f"{unit.high / unit.factor:g}"]
        for name, unit in UNITS.items()
    ]
    return markdown(("unit", "becomes", "least", "most"), rows)


def rates() -> str:
    """The names of rates, by their unit."""
    return (
        f"In TFLOPS: {_codes(FLOAT_RATES)}.\n\nIn TOPS: {_codes(INTEGER_RATES)}.\n\n"
        f"`hal db list` lists {_codes(section.value for section in Section)}."
    )
