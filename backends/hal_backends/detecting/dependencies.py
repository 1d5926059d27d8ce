"""What is missing beside hardware that is here, and the remedy: drivers, device nodes, libraries,
a torch made for it, the vendor's extension of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hal.device import Evidence, MissingDependency
from hal.host import HostProbe
from hal_backends.detecting.nodes import Access, NodeFinding
from hal_backends.detecting.pci import PciFunction
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.software import Claim, TorchBuild
from hal_backends.detecting.tools import ToolReport


def unusable_cards(
    rules: FamilyRules,
    functions: Sequence[PciFunction],
    usable: Sequence[PciFunction],
    findings: Mapping[str, NodeFinding],
    report: ToolReport,
) -> list[MissingDependency]:
    """One entry for each reason, with the cards that it keeps from use."""
    reasons: dict[tuple[str, str], list[PciFunction]] = {}
    for function in functions:
        if function not in usable:
            reason = _why_unusable(rules, function, findings.get(function.address), report)
            reasons.setdefault(reason, []).append(function)
    return [
        MissingDependency(
            hardware=_hardware(rules, cards),
            software=software,
            remedy=remedy,
            evidence=tuple(_seen(function, findings.get(function.address)) for function in cards),
        )
        for (software, remedy), cards in reasons.items()
    ]


def _why_unusable(
    rules: FamilyRules, function: PciFunction, finding: NodeFinding | None, report: ToolReport
) -> tuple[str, str]:
    """What is missing for one card, and the remedy."""
    software = rules.software
    if finding is None:
        if function.driver == "vfio-pci":
            return (
                "the vendor's kernel driver, as vfio-pci holds the card",
                "the card is reserved for a virtual machine; unbind vfio-pci to use it here",
            )
        held = f", as {function.driver} holds the card" if function.driver else ""
        return f"the kernel driver{held}", software.driver_remedy
    if finding.access is not Access.GIVEN:
        return (
            f"its device node ({finding.nodes})",
            "give it to the container (its runtime's device option), or load the kernel driver",
        )
    if report.problem:
        return (
            f"a working driver library: `{report.command}` says {report.problem}",
            software.driver_remedy,
        )
    parts = [rules.partition_of(device) for device in report.device_at(function.address)]
    if any(parts):
        return (
            f"a whole card: it is cut into {parts[0]}, which are not described yet",
            "end the partitioning with the vendor's tool, or leave the card to others",
        )
    return (
        f"an answer of the card: `{report.command}` does not list it",
        "look into the kernel's log; a card that fell off the bus needs a reset or a reboot",
    )


def missing_software(
    host: HostProbe,
    rules: FamilyRules,
    usable: Sequence[PciFunction],
    build: TorchBuild | None,
    foreign: Sequence[Claim],
    report: ToolReport,
) -> tuple[list[MissingDependency], bool]:
    """What the usable cards lack, and whether the driver itself is complete."""
    software = rules.software
    places = [place for place in software.libraries if host.exists(place)]
    is_complete = bool(places or report.devices or not software.libraries)
    hardware = _hardware(rules, usable)
    if not is_complete and not _is_on_library_path(host, software.library):
        seen = Evidence(
            source=software.library, found=f"in none of {len(software.libraries)} places"
        )
        missing = MissingDependency(
            hardware=hardware,
            software=f"the driver's library {software.library}",
            remedy=software.driver_remedy,
            evidence=(seen,),
        )
        return [missing], False
    found = [*_torch_problem(host, rules, build, foreign), *_module_problem(host, rules, build)]
    evidence = (build.evidence,) if build else ()
    return [
        MissingDependency(hardware=hardware, software=what, remedy=remedy, evidence=evidence)
        for what, remedy in found
    ], True


def _is_on_library_path(host: HostProbe, library: str) -> bool:
    folders = (host.environ("LD_LIBRARY_PATH") or "").split(":")
    return any(host.exists(f"{folder}/{library}") for folder in folders if folder.startswith("/"))


def _torch_problem(
    host: HostProbe, rules: FamilyRules, build: TorchBuild | None, foreign: Sequence[Claim]
) -> list[tuple[str, str]]:
    software = rules.software
    if build is None:
        return [("torch", software.torch_remedy)]
    if host.package_file("torch", "torch/version.py") is None:
        what = f"all of torch: {build.version} is registered, torch/version.py is not there"
        return [(what, f"reinstall it: {software.torch_remedy}")]
    if build.flavour in software.builds and not (foreign and rules.torch_device == "cuda"):
        return []
    whose = foreign[0].backend if foreign else build.flavour
    what = f"a torch for this hardware; {build.version} is built for {_builds(whose)}"
    return [(what, software.torch_remedy)]


def _builds(flavour: str) -> str:
    names = {"cpu": "CPUs only", "cuda": "NVIDIA CUDA", "hip": "AMD ROCm", "xpu": "Intel XPU"}
    return names.get(flavour, f"the {flavour} card of this host")


def _module_problem(
    host: HostProbe, rules: FamilyRules, build: TorchBuild | None
) -> list[tuple[str, str]]:
    """The vendor's extension of torch: absent, half installed, or of another torch."""
    software = rules.software
    if not software.module:
        return []
    version = host.package_version(software.module)
    if not host.has_module(software.module):
        if version is None:
            return [(f"the torch extension {software.module}", software.module_remedy)]
        what = f"all of {software.module}: {version} is registered, its module is not there"
        return [(what, f"reinstall it: {software.module_remedy}")]
    if software.tracks_torch and build is not None and version is not None:
        ours, theirs = (text.split("+")[0].split(".")[:2] for text in (version, build.version))
        if ours != theirs:
            what = f"{software.module} for torch {build.version}; {version} is for another torch"
            return [(what, software.module_remedy)]
    return []


def _hardware(rules: FamilyRules, functions: Sequence[PciFunction]) -> str:
    addresses = [function.address for function in functions]
    shown = ", ".join(addresses[:4]) + (f" and {len(addresses) - 4} more" if addresses[4:] else "")
    return f"{rules.hardware} {shown}"


def _seen(function: PciFunction, finding: NodeFinding | None) -> Evidence:
    driver = f"driver {function.driver}" if function.driver else "no driver"
    nodes = f", {finding.nodes}" if finding is not None else ""
    return Evidence(
        source=f"/sys/bus/pci/devices/{function.address}", found=f"{function.id}, {driver}{nodes}"
    )
