"""Checks an installed halstack wheel from outside of the checkout; `tox -e wheel` runs it.

Nothing of the checkout may be needed or found: the script is started in an empty folder, and
refuses to run where `hal` comes from a source tree.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PLUGINS = [
    *("amd", "ascend", "biren", "cambricon", "cpu", "database", "enflame", "engine", "gaudi"),
    *("hygon", "iluvatar", "intel_xpu", "kernels", "kunlunxin", "metax", "moore_threads", "nvidia"),
    *("reference", "tecorigin", "thead"),
]
PACKAGES = {"hal", "hal_backends", "hal_capability_db", "hal_engine", "hal_kernels"}
COMMAND_DEADLINE_S = 180
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}


class CheckError(Exception):
    """The installed distribution is not what it should be: what was required and found."""


def require(what: str, required: object, found: object) -> None:
    if required != found:
        raise CheckError(f"{what}: required {required!r}, found {found!r}")
    sys.stdout.write(f"{what}: as required\n")


def check_files(distribution: importlib.metadata.Distribution) -> None:
    """Top-level names of the distribution, its typing markers and its licence."""
    files = [Path(str(file)) for file in distribution.files or ()]
    outside = {file.parts[0] for file in files if file.parts[0] == ".."}
    tops = {file.parts[0] for file in files} - outside
    info = {top for top in tops if top.endswith(".dist-info")}
    require("top-level names", PACKAGES, tops - info)
    require("dist-info folders", 1, len(info))
    require("files beside the packages", {"hal"}, {f.name for f in files if f.parts[0] == ".."})
    presets = {f.stem for f in files if f.parts[:2] == ("hal_engine", "presets")}
    require("presets with their sources", True, {"sources", "deepseek-v3.2"} <= presets)
    page = {f.name for f in files if f.parts[:3] == ("hal_engine", "server", "static")}
    required = {"index.html", "main.js", "dashboard.css", "grafana-dashboard.json"}
    require("the server's page", True, required <= page)
    marked = {file.parts[0] for file in files if file.name == "py.typed"}
    require("packages with py.typed", PACKAGES, marked)
    require("licence in the wheel", True, any(file.name == "LICENSE" for file in files))
    compiled = [str(f) for f in files if f.suffix in (".so", ".pyd")]
    require("compiled files", [], compiled)


def check_place() -> None:
    """Every package is imported from the environment's site-packages."""
    site = Path(sysconfig.get_paths()["purelib"]).resolve()
    for name in sorted(PACKAGES):
        file = importlib.import_module(name).__file__
        require(f"{name} is in site-packages", True, file and Path(file).is_relative_to(site))


def check_entry_points(distribution: importlib.metadata.Distribution) -> None:
    """Every entry point can be loaded; that of pytest by pytest only, which need not be there."""
    groups: dict[str, list[str]] = {}
    for point in distribution.entry_points:
        if point.group != "pytest11":
            point.load()
        groups.setdefault(point.group, []).append(point.name)
    require(
        "entry points",
        {
            "console_scripts": ["hal"],
            "hal.backends": PLUGINS,
            "hal.settings": ["database", "engine", "serve"],
            "pytest11": ["hal_audit"],
        },
        {group: sorted(names) for group, names in groups.items()},
    )


def run_hal(*arguments: str) -> Any:
    """The JSON that `hal` prints. Raises CheckError if it fails."""
    hal = Path(sysconfig.get_paths()["scripts"]) / "hal"
    done = subprocess.run(
        [str(hal), *arguments], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
    )
    if done.returncode:
        raise CheckError(f"hal {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def check_commands(distribution: importlib.metadata.Distribution) -> None:
    """The command works, up to a plan made from a config.json."""
    require("hal version", distribution.version, run_hal("version", "--json")["halstack"])
    plugins = run_hal("doctor", "--list", "--json")
    require("plug-ins", PLUGINS, sorted(p["name"] for p in plugins))
    require("their problems", [], [p["problem"] for p in plugins if p["problem"]])
    database = run_hal("db", "validate", "--json")
    require("problems of the device database", [], database["problems"])
    require("48 devices and more", True, database["valid"]["devices"] >= 48)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        plan = run_hal("plan", folder, "--json", "-")
    require("plan schema", "halstack.plan/1", plan["schema"])
    ops = {op["op"] for op in plan["ops"]}
    require("attention and gemm are planned", True, {"attention", "gemm"} <= ops)
    require("a weak tier in the plan", [], [o for o in plan["ops"] if o["tier"] == "reference"])


def main() -> int:
    """Exit code 1 at the first check that fails."""
    distribution = importlib.metadata.distribution("halstack")
    try:
        check_place()
        check_files(distribution)
        check_entry_points(distribution)
        check_commands(distribution)
    except CheckError as error:
        sys.stderr.write(f"installed wheel: {error}\n")
        return 1
    sys.stdout.write("the installed wheel is complete\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
