"""Tables about models, number formats, settings, endpoints and words, made from the code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hal.errors import PlanError
from hal.ops.formats import FORMATS, WeightFormat
from hal.reasons import ReasonKind
from hal.settings_sections import SettingsCatalogue
from hal.tiers import Tier
from hal_engine import config_gguf
from hal_engine.checkpoint.gguf_names import FORMAT_OF_TYPE
from hal_engine.config import RUNNABLE_FAMILIES, ModelConfig, load_model_config
from hal_engine.config_huggingface import FAMILIES, family_architectures
from hal_engine.precision import PRECISIONS, resolve_precision
from hal_engine.preset_files import load_presets
from support import markdown

_MOST = 2**31 - 1  # a bound against overflow, not one that a user meets


def families() -> str:
    """Per family: names in config.json and GGUF, and what its layers have."""
    gguf_names: dict[str, list[str]] = {}
    for architecture, family in config_gguf._FAMILIES.items():
        gguf_names.setdefault(family, []).append(architecture)
    rows = []
    for family, traits in FAMILIES.items():
        if family not in RUNNABLE_FAMILIES:
            continue
        bias = {None: "optional", True: "yes", False: "no"}[traits.fixed_qkv_bias]
        rows.append(
            [
                f"`{family}`",
                f"`{traits.architecture}`",
                ", ".join(f"`{name}`" for name in gguf_names.get(family, [])) or "–",
                bias,
                "optional" if traits.reads_mlp_bias else "no",
                "yes" if traits.qk_norm else "no",
            ]
        )
    columns = ("`model_type`", "architecture", "GGUF", "q, k, v bias", "MLP bias", "q, k norm")
    return markdown(columns, rows)


def planned_families() -> str:
    """Per family that can be planned and not run: its names, and the presets of it."""
    presets: dict[str, list[str]] = {}
    for preset in load_presets().values():
        presets.setdefault(load_model_config(preset.path).family, []).append(f"`{preset.name}`")
    rows = [
        [f"`{family}`", f"`{architecture}`", ", ".join(presets.get(family, [])) or "–"]
        for family, architecture in family_architectures().items()
        if family not in RUNNABLE_FAMILIES
    ]
    return markdown(("`model_type`", "architecture", "presets"), rows)


def weight_formats() -> str:
    """Per weight format: how values are stored, and where they come from."""
    types: dict[str, list[str]] = {}
    for ggml_type, name in FORMAT_OF_TYPE.items():
        types.setdefault(name, []).append(f"GGUF {ggml_type}")
    for name in ("float32", "bfloat16", "float16"):
        types[name].insert(0, "safetensors")
    rows = []
    for name, format_ in FORMATS.items():
        is_packed = format_.element == "int" and (format_.group_size or 0) > 32
        made = "made on request" if format_.element == "int" else "not read yet"
        made = "GPTQ, AWQ and compressed-tensors, by `packed_int4`" if is_packed else made
        origin = ", ".join(types.get(name, [])) or made
        value = f"{format_.bits}"
        if format_.element != "int":
            value += f", {format_.element.partition('_')[2]}"
        activations = _ACTIVATIONS[format_.activation]
        rows.append([f"`{name}`", value, _scales(format_), activations, origin])
    columns = ("format", "bits", "scales", "activations in the product", "stored in")
    return markdown(columns, rows)


_ACTIVATIONS = {
    "float": "as they are",
    "int8_per_token": "int8, scale per token",
    "fp8_per_token": "e4m3, scale per token",
    "fp8_group128": "e4m3, float32 per 128",
    "fp8_group128_ue8m0": "e4m3, ue8m0 per 128",
    "fp8_group32": "e4m3, float32 per 32",
    "mxfp8_group32": "e4m3, ue8m0 per 32",
    "mxfp4_group32": "e2m1, ue8m0 per 32",
    "nvfp4_group16": "e2m1, e4m3 per 16",
}


def _scales(format_: WeightFormat) -> str:
    if format_.group_size is None:
        return "–"
    group = str(format_.group_size or "output channel")
    if format_.block_n > 1:
        group = f"{format_.block_n}×{group}"
    offset = "zero" if format_.has_zeros else "minimum"
    minimum = "" if format_.is_symmetric else f", with a {offset}"
    return f"{format_.scale_dtype} per {group}{minimum}"


def precisions() -> str:
    """Per `--precision` and stored format: the format of the product, asked from the engine."""
    stored = ("float32", "bfloat16", "int8_g32", "int4_g32", "int4_g32_asym")
    config = _small_config()
    rows = []
    for name in PRECISIONS:
        cells = []
        for format_name in stored:
            is_block = not FORMATS[format_name].is_dense
            formats = {"weight": format_name} if is_block else {}
            kept: Any = "float32" if is_block else format_name
            stored_config = dataclasses.replace(config, dtype=kept, stored_formats=formats)
            cells.append(_outcome(stored_config, name))
        rows.append([f"`{name}`", *cells])
    return markdown(["`--precision`", *(f"stored as `{s}`" for s in stored)], rows)


def _outcome(config: ModelConfig, name: Any) -> str:
    precision = resolve_precision(config, name, "auto", frozenset())
    try:
        weight = precision.weight_format(config, ["weight"]).name
    except PlanError:
        return "refused"
    return f"`{weight}`" + (", bfloat16 activations" if precision.dtype == "bfloat16" else "")


def _small_config() -> ModelConfig:
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
        return load_model_config(path / "config.json")


class _NoEngine:
    """Enough of an engine to list the server's routes and metrics."""

    def plan_hash(self) -> str:
        return ""

    def stats(self) -> Any:
        from hal_engine.api import EngineStats

        return EngineStats(**{f.name: 0 for f in dataclasses.fields(EngineStats)})

    def op_calls(self) -> list[Any]:
        return []

    def degraded_reasons(self) -> list[str]:
        return []


def endpoints() -> str:
    """Every route of the server with what its function says of itself."""
    from starlette.routing import Route

    from hal_engine.server.app import create_app
    from hal_engine.server.config import ServerConfig

    app = create_app(_NoEngine(), ServerConfig())  # type: ignore[arg-type]
    rows = []
    for route in app.routes:
        if not isinstance(route, Route):
            raise ValueError(f"endpoint table: required plain routes, found {route!r}")
        methods = sorted((route.methods or set()) - {"HEAD"})
        path = route.path.replace(":path", "")
        text = " ".join((inspect.getdoc(route.endpoint) or "").split("\n\n")[0].split())
        rows.append([f"`{' '.join(methods)} {path}`", text.partition(". Raises ")[0].rstrip(".")])
    return markdown(("endpoint", "what it does"), rows)


def metrics() -> str:
    """Every metric family of `/metrics`."""
    from hal_engine.server.metrics import ServerMetrics

    registry: CollectorRegistry = ServerMetrics(_NoEngine(), "").registry  # type: ignore[arg-type]
    rows = []
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append([f"`{name}`", family.type, family.documentation])
    return markdown(("metric", "type", "what it is"), sorted(rows))


def settings(section: str) -> str:
    """Every key of a settings section: default, allowed values and meaning."""
    model = SettingsCatalogue.installed().model(section)
    rows = [
        [f"`{section}.{key}`", _default(field), _allowed(field), field.description or ""]
        for key, field in model.model_fields.items()
    ]
    return markdown(("key", "default", "allowed", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "(required)"
    if value is None or value == () or value == {} or value == "":
        return "none"
    return f"`{json.dumps(value) if not isinstance(value, Path) else value}`"


def _allowed(field: FieldInfo) -> str:
    bounds = []
    for item in field.metadata:
        match item:
            case annotated_types.Ge():
                bounds.append(f"≥ {item.ge:,}")
            case annotated_types.Gt():
                bounds.append(f"> {item.gt:,}")
            case annotated_types.Le() if item.le == _MOST:
                continue
            case annotated_types.Le():
                bounds.append(f"≤ {item.le:,}")
            case annotated_types.Lt():
                bounds.append(f"< {item.lt:,}")
    return ", ".join(bounds) or _type_text(field.annotation)


def _type_text(annotation: Any) -> str:
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_text(a) for a in arguments)
    names = {bool: "true, false", str: "text", Path: "a path", int: "an integer", float: "a number"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is tuple:
        return "a list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    return "text" if isinstance(annotation, type) else "a table"


def tiers() -> str:
    """The tiers, best first, as their docstring explains them."""
    return _explained([t.label for t in sorted(Tier, reverse=True)], Tier.__doc__ or "")


def reason_kinds() -> str:
    """The kinds of reasons, as their docstring explains them."""
    return _explained([kind.value for kind in ReasonKind], ReasonKind.__doc__ or "")


def _explained(words: list[str], docstring: str) -> str:
    """`WORD: text.` sentences of a docstring as a table. Raises ValueError if a word has none."""
    text = " ".join(docstring.split())
    rows = []
    for word in words:
        _, found, rest = text.partition(f"{word.upper()}: ")
        if not found:
            raise ValueError(f"docstring: required an explanation of {word.upper()}, found none")
        ends = [rest.find(f" {other.upper()}: ") for other in words]
        rows.append([f"`{word}`", rest[: min([e for e in ends if e > 0], default=len(rest))]])
    return markdown(("word", "meaning"), [[word, text.rstrip(".")] for word, text in rows])
