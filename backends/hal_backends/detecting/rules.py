"""What tells one vendor's detection from another's, as data; `survey` is the code they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal.host import HostProbe
from hal_backends.detecting.pci import PciFunction

if TYPE_CHECKING:
    from hal_backends.detecting.fabric import Fabric, Member

_ACCELERATOR_CLASSES = ("0x03", "0x0b40", "0x12")  # display, co-processor, accelerator
# Of vendors that make nothing else, whose cards also call themselves communication controllers,
# system peripherals or nothing at all. Bridges, network and sound are never cards.
_ONLY_CARDS_CLASSES = (*_ACCELERATOR_CLASSES, "0x0780", "0x0880", "0xff")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDevice:
    """One device as the vendor's tool lists it. address: normalised, "" if the tool has none."""

    index: int
    name: str
    address: str = ""
    memory_bytes: int = 0
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The vendor's management tool.

    parse: its standard output -> devices, [] if not understood. is_proof: a failure of the tool
    proves that the driver does not work; not so for a tool that shares its name with another
    vendor's, or that needs more than the driver.
    """

    argv: tuple[str, ...]
    parse: Callable[[str], list[ToolDevice]]
    is_proof: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRule:
    """The device nodes a process needs.

    control: all of them are needed. pattern: the nodes of single cards, a regular expression over
    names in `folder`. node_of: the node of one card where the kernel says which it is, "" if not.
    vendor_node: a path that only this vendor's driver makes, by which hardware is known where
    sysfs does not show it. passed_through: the same for another way to the hardware, which has one
    node for everything and no nodes of cards: (path of the vendor's, node).
    """

    control: tuple[str, ...] = ()
    folder: str = "/dev"
    pattern: str = ""
    node_of: Callable[[HostProbe, PciFunction], str] | None = None
    vendor_node: str = ""
    passed_through: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleRule:
    """How a process is told which devices it has.

    layers: applied one after the other, each over what the one before left; the names in one layer
    are synonyms. selects_by: the detail of the tool that the numbers mean ("" for the ordinal).
    order_variable: the variable and value without which unlike devices are not in PCI order.
    is_pci_order: whether devices are numbered by PCI address; if not, only the tool knows.
    """

    layers: tuple[tuple[str, ...], ...]
    selects_by: str = ""
    order_variable: tuple[str, str] = ("", "")
    is_pci_order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRule:
    """What has to be installed to use the hardware through torch.

    builds: flavours of torch (`software.TorchBuild.flavour`) that serve the family.
    torch_remedy: where such a torch comes from. module: the extension's top-level module.
    packages: further distributions whose versions decide what can run. tracks_torch: the extension
    has torch's own major and minor version.
    libraries: the driver's user library, in any of these places; its name is `library`.
    """

    builds: frozenset[str]
    torch_remedy: str
    module: str = ""
    module_remedy: str = ""
    tracks_torch: bool = False
    library: str = ""
    libraries: tuple[str, ...] = ()
    driver_remedy: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One device as PCI, the vendor's tool and torch in a child show it; the last two if asked."""

    function: PciFunction
    tool: ToolDevice | None = None
    torch_name: str = ""
    torch_capability: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """One family of accelerators.

    backend: the plug-in's name. family: its id in the capability database. hardware: for people.
    pci_vendor: "" where no PCI vendor id is known. is_accelerator: which functions of the vendor
    are accelerators; by default those of an accelerator's PCI class. drivers: kernel drivers that
    serve it, () for any. name_pattern: what names of this family look like. has_internal_switch:
    see `scan_pci`. partition_of: how the vendor calls the parts that a card is cut into, "" for a
    whole card. refine: what else the kernel tells of one device: "name" (the model's, where a PCI
    id is shared), "arch", "memory_bytes", "num_cores", and attributes of the specification.
    fabric: which of the devices are linked, None where nothing tells.
    """

    backend: str
    family: str
    vendor: str
    hardware: str
    pci_vendor: str
    torch_device: str
    name_pattern: str
    nodes: NodeRule
    visible: VisibleRule
    software: SoftwareRule
    tools: tuple[Tool, ...] = ()
    drivers: tuple[str, ...] = ()
    is_accelerator: Callable[[PciFunction], bool] = lambda function: has_class(function)
    has_internal_switch: bool = False
    partition_of: Callable[[ToolDevice], str] = lambda device: ""
    refine: Callable[[HostProbe, Sighting], dict[str, str]] | None = None
    fabric: Callable[[HostProbe, Sequence[Member]], Fabric | None] | None = None


def has_class(function: PciFunction, prefixes: tuple[str, ...] = _ACCELERATOR_CLASSES) -> bool:
    """Whether the function's class code starts with one of the prefixes."""
    return function.class_code.startswith(prefixes)


def is_card(function: PciFunction) -> bool:
    """Whether a function of a vendor that makes nothing but accelerators is one."""
    return has_class(function, _ONLY_CARDS_CLASSES)
