"""Check what crosses the border between a plug-in and the hardware layer.

Each function returns its argument with a type that can be trusted, or raises TypeError or
ValueError with "required …, found …" in one sentence; the caller adds plug-in and hook.
"""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from hal.candidates import KernelCandidate
from hal.device import FORCIBLE_FEATURES, DetectedDevice, DevicePolicy, DeviceSpec
from hal.hookspecs import BackendInfo, Provides, Runtime
from hal.tiers import Tier

_Data = TypeVar("_Data")

MAX_ANSWERS = 4096
MAX_SAVED_US = 1e6  # of a call: more is a mistake in the unit
"""The most items one hook may answer with: far more than any host has devices."""
_MAX_SHOWN = 160
_MOST = 1e24  # above every rate and size that a device has
_RUNTIME_MEMBERS = tuple(name for name in vars(Runtime) if not name.startswith("_"))


def shown(value: object) -> str:
    """A short, bounded description of a value that may be hostile to `repr`."""
    try:
        text = repr(value)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in's __repr__ may do anything
        text = f"<its repr raised {type(error).__name__}>"
    if len(text) > _MAX_SHOWN:
        text = text[:_MAX_SHOWN] + "…"
    return f"{type(value).__name__} {text}"


def to_document(value: Any) -> Any:
    """Plain data of a dataclass: sets sorted, mappings as dictionaries, ready for JSON.

    Raises:
        TypeError, ValueError: a field holds something JSON has no form for, or is not finite.
    """
    data = asdict(value)
    try:
        text = json.dumps(data, default=_plain, allow_nan=False, sort_keys=True)
    except ValueError as error:  # NaN, infinity, or a value that contains itself
        raise ValueError(f"required finite numbers, found {error} in {shown(value)}") from error
    return json.loads(text)


def _plain(value: object) -> object:
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"required plain data, found {shown(value)}")


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def _adapter(data_type: Any) -> TypeAdapter[Any]:
    if data_type not in _ADAPTERS:
        _ADAPTERS[data_type] = TypeAdapter(data_type)
    return _ADAPTERS[data_type]


def prepare_checks(*data_types: type[object]) -> None:
    """Make what the checks of these dataclasses need, which takes longer than a check."""
    for data_type in data_types:
        _adapter(data_type)


def from_document(data_type: type[_Data], document: object) -> _Data:
    """The dataclass that `document` (parsed JSON) describes, every field checked.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    try:
        checked: _Data = _adapter(data_type).validate_json(json.dumps(document), strict=True)
        return checked
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"required a valid {data_type.__name__}, found {where or 'the value'}: "
            f"{first['msg']} ({shown(first['input'])})"
        ) from error


def checked_data(data_type: type[_Data], value: object) -> _Data:
    """`value`, if it is an instance of the dataclass with every field of its declared type."""
    if not isinstance(value, data_type):
        raise TypeError(f"required {data_type.__name__}, found {shown(value)}")
    from_document(data_type, to_document(value))
    return value


def checked_sequence(data_type: type[_Data], value: object) -> tuple[_Data, ...]:
    """`value` as a tuple, if it is a list or tuple of valid instances of the dataclass."""
    return tuple(checked_data(data_type, item) for item in _items(data_type, value))


def _items(data_type: type[object], value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"required a list or tuple of {data_type.__name__}, found {shown(value)}")
    if len(value) > MAX_ANSWERS:
        raise ValueError(f"required at most {MAX_ANSWERS} items, found {len(value)}")
    return value


def checked_policy(value: object) -> DevicePolicy:
    """A `DevicePolicy` that forces on only what something reads."""
    policy = checked_data(DevicePolicy, value)
    unknown = sorted(policy.forced_features.keys() - set(FORCIBLE_FEATURES))
    if unknown:
        known = ", ".join(FORCIBLE_FEATURES)
        raise ValueError(f"required forced features among {known}, found {', '.join(unknown)}")
    saved = policy.capture_saves_us
    if not 0 <= saved <= MAX_SAVED_US:
        raise ValueError(
            f"required capture_saves_us between 0 and {MAX_SAVED_US:g}, found {saved:g}"
        )
    return policy


def checked_info(value: object) -> BackendInfo:
    """A `BackendInfo` with a usable name and known `provides`."""
    info = checked_data(BackendInfo, value)
    known = get_args(Provides)
    if not info.name or not info.provides <= set(known):
        raise ValueError(f"required a name and `provides` within {known}, found {shown(info)}")
    return info


def checked_devices(devices: Iterable[DetectedDevice]) -> tuple[DetectedDevice, ...]:
    """The devices sorted by id; ids must be printable and unique."""
    by_id: dict[str, DetectedDevice] = {}
    for device in devices:
        if not device.device_id or not device.device_id.isprintable():
            raise ValueError(f"required a printable device_id, found {shown(device.device_id)}")
        if device.device_id in by_id:
            raise ValueError(f"required unique device ids, found {device.device_id!r} twice")
        by_id[device.device_id] = device
    return tuple(by_id[device_id] for device_id in sorted(by_id))


def checked_spec(value: object, device: DetectedDevice, backend: str) -> DeviceSpec:
    """A `DeviceSpec` that is about the device asked for, and says which backend describes it."""
    spec = checked_data(DeviceSpec, value)
    for what, required, found in (
        ("device_id", device.device_id, spec.device_id),
        ("backend", backend, spec.backend),
    ):
        if required != found:
            raise ValueError(f"required {what} {required!r}, found {found!r}")
    _check_figures(spec)
    return spec


def checked_measured(value: object) -> DeviceSpec:
    """A `DeviceSpec` with figures that a device can have."""
    spec = checked_data(DeviceSpec, value)
    _check_figures(spec)
    return spec


def _check_figures(spec: DeviceSpec) -> None:
    """Plans divide by rates: 0 and None both mean unknown, and nothing is negative or beyond what
    could be a device's."""
    figures: dict[str, object] = {
        "num_cores": spec.num_cores,
        "memory_bytes": spec.memory_bytes,
        "memory_bandwidth": spec.memory_bandwidth or 0,
        **{f"peak_flops.{dtype}": rate for dtype, rate in spec.peak_flops.items()},
        **{
            f"attributes.{name}": figure
            for name, figure in spec.attributes.items()
            if "bytes_per_s" in name or "latency_us" in name
        },
    }
    for name, figure in figures.items():
        is_figure = isinstance(figure, int | float) and (figure == 0 or 1e-3 <= figure <= _MOST)
        if not is_figure:
            raise ValueError(
                f"required {name} of {spec.device_id!r} as 0 or 0.001 to {_MOST:g}, "
                f"found {shown(figure)}"
            )


def checked_profiles(value: object, backend: str) -> tuple[DeviceSpec, ...]:
    """Profiles sorted by id, each once, of the backend that answers."""
    by_id: dict[str, DeviceSpec] = {}
    for spec in checked_sequence(DeviceSpec, value):
        if spec.backend != backend:
            raise ValueError(f"required backend {backend!r}, found {spec.backend!r}")
        if not spec.device_id or not spec.device_id.isprintable() or spec.device_id in by_id:
            raise ValueError(f"required unique printable ids, found {shown(spec.device_id)}")
        _check_figures(spec)
        by_id[spec.device_id] = spec
    return tuple(by_id[device_id] for device_id in sorted(by_id))


def checked_candidates(
    value: object, op: str, backend: str, distribution: str
) -> tuple[KernelCandidate, ...]:
    """Candidates for `op`, named `<backend>.…`, each once, marked with their distribution."""
    candidates: dict[str, KernelCandidate] = {}
    for item in _items(KernelCandidate, value):
        if not isinstance(item, KernelCandidate):
            raise TypeError(f"required KernelCandidate, found {shown(item)}")
        _check_candidate(item, op, backend)
        if item.name in candidates:
            raise ValueError(f"required unique candidate names, found {item.name!r} twice")
        candidates[item.name] = replace(item, distribution=distribution)
    return tuple(candidates[name] for name in sorted(candidates))


def _check_candidate(candidate: KernelCandidate, op: str, backend: str) -> None:
    if not isinstance(candidate.name, str) or not candidate.name.startswith(f"{backend}."):
        raise ValueError(f"required a candidate name `{backend}.…`, found {shown(candidate.name)}")
    if not candidate.name.isprintable():
        raise ValueError(f"required a printable candidate name, found {shown(candidate.name)}")
    if candidate.op != op:
        raise ValueError(f"required candidates for {op!r}, found {candidate.name} for another op")
    if not isinstance(candidate.tier, Tier):
        raise TypeError(f"required a Tier for {candidate.name}, found {shown(candidate.tier)}")
    callables = (
        "not_supported_reasons", "load", "estimate_us", "estimate_source", "semantic_notes", "work",
        "kernel_uses",
    )  # fmt: skip
    for field in callables:
        if not callable(getattr(candidate, field)):
            raise TypeError(f"required a callable {field} of {candidate.name}")
    for field in ("summary", "untuned", "weight_layout"):
        if not isinstance(getattr(candidate, field), str):
            raise TypeError(f"required {field} of {candidate.name} as text")


def checked_runtime(value: object) -> Runtime:
    """An object with every member of the `Runtime` protocol; no member is evaluated."""
    missing = [
        name for name in _RUNTIME_MEMBERS if inspect.getattr_static(value, name, None) is None
    ]
    if value is None or missing:
        lacks = f" without {', '.join(missing)}" if missing else ""
        raise TypeError(f"required a Runtime, found {shown(value)}{lacks}")
    runtime: Runtime = value  # type: ignore[assignment]  # structural: just checked
    return runtime
