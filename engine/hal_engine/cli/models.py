"""`hal models`: the presets, and where their values come from."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from hal.errors import SettingsError
from hal.suggestions import did_you_mean
from hal_engine.cli.plan_table import terminal
from hal_engine.config import load_model_config
from hal_engine.preset_files import Preset, load_presets

_SHOWN = 48  # characters of a value in the table


def models(
    name: Annotated[str | None, typer.Argument(help="A preset: its values and sources.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that come as presets: configurations to plan with, without weights."""
    presets = load_presets()
    if name is None:
        chosen = list(presets.values())
    elif name in presets:
        chosen = [presets[name]]
    else:
        raise SettingsError("preset", "one of hal models", name, did_you_mean(name, presets))
    if json_:
        sys.stdout.write(json.dumps([_document(preset) for preset in chosen], indent=1) + "\n")
    elif name is None:
        _print_list(chosen)
    else:
        _print_sources(chosen[0])


def _document(preset: Preset) -> dict[str, object]:
    config = load_model_config(preset.path)
    return {
        "name": preset.name,
        "title": preset.title,
        "repository": preset.repository,
        "parameters": preset.parameters,
        "family": config.family,
        "runs": config.is_runnable,
        "unverified": preset.is_unverified,
        "note": preset.note,
        "sources": {
            key: {"source": found.source, "confidence": found.confidence}
            for key in preset.values()
            for found in [preset.source_of(key)]
        },
    }


def _print_list(presets: list[Preset]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("preset", no_wrap=True, min_width=max(len(item.name) for item in presets))
    for column in ("model", "parameters", "engine", "values"):
        table.add_column(column, overflow="fold")
    for preset in presets:
        runs = load_model_config(preset.path).is_runnable
        table.add_row(
            preset.name,
            preset.repository,
            preset.parameters,
            Text("runs it", style="green") if runs else Text("plans it", style="yellow"),
            Text("unverified", style="yellow") if preset.is_unverified else "from sources",
        )
    terminal().print(table)


def _print_sources(preset: Preset) -> None:
    console = terminal()
    console.print(Text(f"{preset.title}, {preset.repository}, {preset.parameters} parameters"))
    if preset.note:
        console.print(Text(f"note: {preset.note}", style="yellow"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in ("key", "value", "confidence", "source"):
        table.add_column(column)
    for key, value in preset.values().items():
        source = preset.source_of(key)
        text = json.dumps(value)
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
        number = preset.sources.index(source) + 1
        table.add_row(Text(key), Text(shown), source.confidence, Text(f"[{number}]"))
    console.print(table)
    for number, source in enumerate(preset.sources, 1):
        console.print(Text(f"[{number}] {source.source}", style="dim"))
