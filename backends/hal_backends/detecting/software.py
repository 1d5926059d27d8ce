"""Which torch this environment has and for whose hardware it was built, without importing it.

Evidence numbers two and three: the version's local tag, torch/version.py, modules of vendors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hal.device import Evidence
from hal.errors import DetectionError
from hal.host import HostProbe

# Marks of builds that a vendor makes of torch for hardware which then looks like CUDA or HIP:
# in the local tag of the version, and as a variable of torch/version.py that is not None.
_TAGS = (
    ("metax", "metax"),
    ("maca", "metax"),
    ("corex", "iluvatar"),
    ("dtk", "hygon"),
    ("das", "hygon"),
    ("ppu", "thead"),
    ("sail", "thead"),
    ("musa", "moore_threads"),
)
_VARIABLES = {
    "maca": "metax",
    "corex": "iluvatar",
    "hcu": "hygon",
    "sail": "thead",
    "musa": "moore_threads",
}
_ASSIGNMENT = re.compile(
    r"^(\w+)[ \t]*(?::[^=\n]*)?=[ \t]*(?:None|'([^'\n]*)'|\"([^\"\n]*)\"|(True))", re.MULTILINE
)
MASQUERADERS = frozenset({"metax", "iluvatar", "hygon", "kunlunxin", "thead"})
"""Backends whose devices torch shows as CUDA or HIP devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch.

    flavour: a backend whose vendor made the build ("metax", …), else "cuda", "hip", "xpu" or "cpu".
    variables: what torch/version.py sets, without what is None.
    """

    version: str
    flavour: str
    variables: Mapping[str, str]

    @property
    def is_vendor_build(self) -> bool:
        return self.flavour not in ("cuda", "hip", "xpu", "cpu")

    @property
    def evidence(self) -> Evidence:
        shown = ", ".join(
            f"{key} {self.variables[key]}"
            for key in ("cuda", "hip", "xpu", *_VARIABLES)
            if key in self.variables
        )
        return Evidence(
            source="torch version and torch/version.py", found=f"{self.version} ({shown or 'cpu'})"
        )


def torch_build(host: HostProbe) -> TorchBuild | None:
    """The installed torch, None if there is none.

    Raises:
        DetectionError: the version's tag and torch/version.py name different vendors.
    """
    version = host.package_version("torch")
    if version is None:
        return None
    variables = {
        name: single or double or yes
        for name, single, double, yes in _ASSIGNMENT.findall(
            host.package_file("torch", "torch/version.py") or ""
        )
        if single or double or yes
    }
    tag = version.partition("+")[2].lower()
    by_tag = next((vendor for mark, vendor in _TAGS if mark in tag), "")
    by_variable = next((_VARIABLES[name] for name in _VARIABLES if name in variables), "")
    if by_tag and by_variable and by_tag != by_variable:
        raise DetectionError(
            "torch",
            "a version tag and a torch/version.py of one vendor",
            f"tag +{tag} of {by_tag}, version.py of {by_variable}",
            "two builds of torch were installed over each other: install one in a new environment",
        )
    flavour = by_tag or by_variable or _stock_flavour(tag, variables)
    return TorchBuild(version=version, flavour=flavour, variables=variables)


def _stock_flavour(tag: str, variables: Mapping[str, str]) -> str:
    if "hip" in variables or tag.startswith("rocm"):
        return "hip"
    if "cuda" in variables or re.match(r"cu\d", tag):
        return "cuda"
    return "xpu" if "xpu" in variables or tag == "xpu" else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something installed or set that says "the CUDA devices of this process are `backend`'s"."""

    backend: str
    evidence: Evidence


def masquerade_claims(host: HostProbe, build: TorchBuild | None) -> list[Claim]:
    """Who, besides PCI, claims that this process's CUDA or HIP devices are his."""
    claims = []
    if build is not None and build.flavour in MASQUERADERS:
        claims.append(Claim(backend=build.flavour, evidence=build.evidence))
    if host.has_module("torch_xmlir"):
        seen = Evidence(source="import path", found="module torch_xmlir")
        claims.append(Claim(backend="kunlunxin", evidence=seen))
    sdk = host.environ("PPU_SDK")
    if sdk:
        claims.append(
            Claim(backend="thead", evidence=Evidence(source="environment PPU_SDK", found=sdk))
        )
    return claims
