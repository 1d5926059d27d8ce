"""`hal db`: what it prints, how wide, and its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from database_files import CARD, HEAD, SOURCES, write
from hal.cli.context import CliContext
from hal.errors import UserError
from hal_capability_db import load_database
from hal_capability_db.cli import register_commands
from hal_capability_db.loader import configured_overlays
from hal_process import run_hal


@dataclass
class Answer:
    """What a command printed, its exit code and the user's error that it raised."""

    output: str
    exit_code: int
    error: UserError | None

    @property
    def document(self) -> Any:
        return json.loads(self.output)


class HalDb:
    """Runs `hal db …` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.overlay: Path | None = None

    def __call__(self, *arguments: object, columns: int = 100) -> Answer:
        app = typer.Typer()
        register_commands(app)
        environment = {"COLUMNS": str(columns), "HAL_DATABASE_OVERLAYS": str(self.overlay or "")}
        words: Sequence[str] = ["db", *map(str, arguments)]
        result = CliRunner().invoke(app, words, obj=CliContext(), env=environment)
        error = result.exception if isinstance(result.exception, UserError) else None
        if error is None and not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return Answer(result.stdout, result.exit_code, error)


@pytest.fixture
def hal_db(monkeypatch: pytest.MonkeyPatch) -> HalDb:
    return HalDb(monkeypatch)


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    return write(tmp_path, HEAD + SOURCES + CARD)


PRINT_CONFIG = """
import os
from hal.cli import app
create_context = app._create_context
def seen(*arguments):
    context = create_context(*arguments)
    print("within", os.environ["HAL_CONFIG"])
    return context
app._create_context = seen
try:
    app.main()
except SystemExit:
    print("after", os.environ.get("HAL_CONFIG"))
"""


def test_plugins_read_the_configuration_of_the_command_line(tmp_path: Path) -> None:
    """They load the database by themselves, in this process and in children."""
    config = tmp_path / "hal.toml"
    config.write_text("[database]\noverlays = []\n")
    command = (sys.executable, "-c", PRINT_CONFIG)
    answer = run_hal("--config", "hal.toml", "version", command=command, cwd=tmp_path)
    lines = answer.stdout.splitlines()
    assert f"within {config}" in lines, answer.stderr
    assert lines[-1] == "after None"  # what runs next in the process has its own


SECTIONS = ["devices", "families", "architectures", "links", "sources"]


def test_the_command_is_there() -> None:
    answer = run_hal("db", "list", "--family", "kunlunxin")
    assert answer.returncode == 0, answer.stderr
    assert "kunlunxin-p800" in answer.stdout


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize("section", SECTIONS)
def test_lists_fit_the_terminal(hal_db: HalDb, section: str, columns: int) -> None:
    answer = hal_db("list", section, columns=columns)
    assert answer.exit_code == 0
    assert max(map(len, answer.output.splitlines())) <= min(columns, 100)


def test_every_id_is_listed_in_one_piece(hal_db: HalDb) -> None:
    database = load_database(())
    words = set(hal_db("list", columns=80).output.split())
    assert database.devices.keys() <= words
    words = set(hal_db("list", "architectures", columns=80).output.split())
    assert database.architectures.keys() <= words


def test_unverified_figures_are_marked(hal_db: HalDb) -> None:
    lines = hal_db("list", columns=80).output.splitlines()
    row = next(line for line in lines if line.strip().startswith("rtx-5090"))
    assert "209.5?" in row
    assert "1792?" not in row
    assert "unverified" in hal_db("list").output


@pytest.mark.parametrize("section", SECTIONS)
def test_lists_as_json(hal_db: HalDb, section: str) -> None:
    rows = hal_db("list", section, "--json").document
    assert rows
    assert all(isinstance(row, dict) for row in rows)


def test_a_list_of_one_family(hal_db: HalDb) -> None:
    rows = hal_db("list", "--family", "amd", "--json").document
    assert {row["family"] for row in rows} == {"amd"}
    assert {row["device"] for row in rows} >= {"mi300x", "mi350p"}
    wrong = hal_db("list", "--family", "adm")
    assert wrong.error is not None
    assert "amd" in wrong.error.remedy


def test_every_sheet_fits_and_cites_its_sources(hal_db: HalDb) -> None:
    database = load_database(())
    for name in [*database.devices, *database.families, *database.architectures]:
        answer = hal_db("show", name, columns=80)
        assert answer.exit_code == 0, name
        assert max(map(len, answer.output.splitlines())) <= 80, name
        document = hal_db("show", name, "--json").document
        assert document["id"] == name
        for fact in document["facts"].values():
            assert set(fact["source"]) <= document["sources"].keys()


def test_a_sheet_shows_value_confidence_and_source(hal_db: HalDb) -> None:
    lines = hal_db("show", "l40s").output.splitlines()
    row = next(line for line in lines if line.strip().startswith("fp8 "))
    assert row.split() == [
        "fp8",
        "733",
        "TFLOPS",
        "vendor-code",
        "aiconfig,",
        "torchtitan,",
        "verl",
    ]


def test_an_unknown_id(hal_db: HalDb) -> None:
    answer = hal_db("show", "gfx94")
    assert answer.error is not None
    assert "gfx942" in answer.error.remedy


def test_an_overlay_is_seen_by_every_command(hal_db: HalDb, overlay: Path) -> None:
    hal_db.overlay = overlay
    rows = hal_db("list", "--family", "nvidia", "--json").document
    origin = {row["device"]: row["from"] for row in rows}
    assert origin["my-card"] == str(overlay)
    assert origin["l40s"] == ""
    assert hal_db("show", "my-card", "--json").document["from"] == str(overlay)
    assert "my-card" in hal_db("export").output
    assert hal_db("diff").exit_code == 1


def test_validate(hal_db: HalDb, tmp_path: Path) -> None:
    good = hal_db("validate")
    assert good.exit_code == 0
    assert "no problem" in good.output
    text = (HEAD + SOURCES + CARD).replace("fp8: 200", "fp8: -1").replace("GB,", "GBB,")
    bad = write(tmp_path, text)
    answer = hal_db("validate", bad)
    assert answer.exit_code == 1
    for part in ("fp8", "required:", "found:", "remedy:", "2 problems"):
        assert part in answer.output
    document = hal_db("validate", bad, "--json").document
    assert len(document["problems"]) == 2
    assert {problem["error"] for problem in document["problems"]} == {"DatabaseError"}


def test_validate_reports_unreadable_files_and_goes_on(hal_db: HalDb, tmp_path: Path) -> None:
    write(tmp_path, "[", "a.yaml")
    write(tmp_path, (HEAD + SOURCES + CARD).replace("fp8: 200", "fp8: -1"), "b.yaml")
    document = hal_db("validate", tmp_path, "--json").document
    assert len(document["problems"]) == 2
    assert document["valid"]["devices"] == len(load_database(()).devices)


def test_diff(hal_db: HalDb, overlay: Path) -> None:
    same = hal_db("diff")
    assert same.exit_code == 0
    assert "no differences" in same.output
    answer = hal_db("diff", "built-in", overlay, "--json")
    assert answer.exit_code == 1
    by_name = {entry["name"]: entry for entry in answer.document}
    assert by_name["devices.my-card.peak.fp8"]["before"] is None
    assert by_name["devices.my-card.peak.fp8"]["after"]["value"] == 200e12
    table = hal_db("diff", "built-in", overlay, columns=80).output
    assert "200 TFLOPS [measured: lab]" in " ".join(table.split())


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_export(hal_db: HalDb, tmp_path: Path, form: str) -> None:
    path = tmp_path / "out"
    assert hal_db("export", "--format", form, "--output", path).exit_code == 0
    exported = path.rename(tmp_path / f"out.{form}")
    assert hal_db("diff", "built-in", exported).exit_code == 0
    assert hal_db("export", "--format", form).output == exported.read_text()


def test_export_of_one_device(hal_db: HalDb) -> None:
    document = json.loads(hal_db("export", "mi300x", "--format", "json").output)
    assert [device["id"] for device in document["devices"]] == ["mi300x"]
    wrong = hal_db("export", "mi300y")
    assert wrong.error is not None
    assert "mi300x" in wrong.error.remedy
    unwritable = hal_db("export", "--output", "/nowhere/at/all")
    assert unwritable.error is not None


def test_a_bad_overlay_stops_every_command_with_its_place(hal_db: HalDb, tmp_path: Path) -> None:
    hal_db.overlay = write(tmp_path, HEAD + "devices: 3\n")
    for command in ("list", "export", "diff"):
        error = hal_db(command).error
        assert error is not None
        assert f"{hal_db.overlay}:2" in str(error)


def test_no_overlay_is_configured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HAL_DATABASE_OVERLAYS", "HAL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert configured_overlays() == ()
