"""Fields of plans, settings, options and the changelog, as the documents say they are."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from document_blocks import ROOT, blocks_of
from hal.host import LocalHost
from hal.plugins.manager import PluginLoader, load_backends
from hal.plugins.survey import survey_plugins
from hal.settings import Settings
from hal.waivers import WaiverBook
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.server.config import ServerConfig

CONFIG = """{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 10000.0,
"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "dtype": "float32"}"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(CONFIG, encoding="utf-8")
    registry = load_backends(loader=PluginLoader(survey_plugins(LocalHost())))
    planned = plan_model(folder, EngineOptions(), registry, WaiverBook())
    return planned.plan.to_dict()


def _documented(text: str, after: str) -> set[str]:
    """Names in the first column of the first table after a sentence."""
    table = text[text.index(after) :].split("|---|---|", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.strip().splitlines()]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_of_a_plan_is_documented(plan: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert _documented(text, "## Fields") == plan.keys()
    op = next(op for op in plan["ops"] if op["rejected"])
    assert _documented(text, "Of each entry of `ops`") == op.keys()
    for field in op["rejected"][0]:
        assert f"`{field}`" in text
    reasons = re.search(r"Of each entry of `reasons`: (.*)\.", text)
    assert reasons is not None
    assert set(re.findall(r"`(\w+)`", reasons[1])) == op["rejected"][0]["reasons"][0].keys()


def test_configuration_example(tmp_path: Any) -> None:
    (block,) = [b for b in blocks_of(ROOT / "docs" / "serving.md") if "config" in b.directive]
    file = tmp_path / "halstack.toml"
    file.write_text(block.text, encoding="utf-8")
    settings = Settings.read(config=file, environment={})
    serve = settings.section("serve", ServerConfig, consumer="test")
    engine = settings.section("engine", EngineOptions, consumer="test")
    assert (serve.port, serve.max_n, engine.max_num_seqs) == (9000, 4, 16)


def test_options_of_serve_are_documented() -> None:
    from typer.main import get_command

    from hal.cli.app import create_app
    from hal_engine.cli.serve import serve

    app = create_app()
    app.command("serve")(serve)
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for p in command.params for name in p.opts if name.startswith("--")}
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE))
    named = {option for cell in documented for option in re.findall(r"`(--[\w-]+)", cell)}
    assert named == options - {"--help"}


def test_changelog_has_the_current_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text
    assert project["version"] in text
    sections = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
