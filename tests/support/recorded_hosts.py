"""Composes recorded hosts from parts: sockets, switches, devices, drivers, packages, commands.

    host = HostBuilder("four cards behind one switch, dual socket")
    host.sockets(2, cpus_each=32, memory_gib_each=256)
    switch = host.switch(numa=0, link="4.0 x16")
    cards = host.devices(
        4, "10de:26b9", behind=switch, subsystem="10de:1851", link="4.0 x16", driver="nvidia"
    )
    host.package("torch", "2.9.0+cu129", modules=["torch"], files={"torch/version.py": "…"})
    host.command("nvidia-smi -L", "GPU 0: NVIDIA L40S\n")
    recorded = host.build()

The paths are those of Linux: real ones under /sys/devices, links to them in /sys/bus/pci/devices.
Every device of a call without `behind` gets a root port; each root port a host bridge of its own,
as on servers whose sockets have many, unless `host_bridge` names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hal.host import CommandOutput, RecordedHost

_GT_PER_S = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0", 6: "64.0"}
_CPU_FLAGS = "fpu sse4_2 avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni"


@dataclass
class HostBridge:
    """Where a socket's PCI buses begin: `/sys/devices/pci0000:bb`."""

    bus: int
    numa: int
    next_slot: int = 1

    @property
    def path(self) -> str:
        return f"/sys/devices/pci0000:{self.bus:02x}"


@dataclass
class Port:
    """A PCI bridge behind which devices go: a root port or a port of a switch."""

    address: str
    path: str
    numa: int
    secondary_bus: int
    next_slot: int = 0
    is_switch: bool = False


@dataclass
class HostBuilder:
    """See the module. Every method that adds a thing may be called again."""

    description: str
    files: dict[str, str | None] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    package_files: dict[str, dict[str, str | None]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    commands: dict[str, CommandOutput | None] = field(default_factory=dict)
    _next_bus: int = 0
    _num_cpus: int = 0

    def build(self) -> RecordedHost:
        """The host as it is now; one socket with 16 CPUs if none was named."""
        if not self._num_cpus:
            self.sockets(1, cpus_each=16, memory_gib_each=64)
        return RecordedHost(
            files=dict(self.files),
            links=dict(self.links),
            nodes=frozenset(self.nodes),
            environment=dict(self.environment),
            packages=dict(self.packages),
            package_files={name: dict(files) for name, files in self.package_files.items()},
            modules=frozenset(self.modules),
            commands=dict(self.commands),
            description=self.description,
        )

    # CPUs and memory

    def sockets(
        self,
        count: int,
        *,
        cpus_each: int = 16,
        memory_gib_each: int = 64,
        cpu: str = "AMD EPYC 9554 64-Core Processor",
        cpu_flags: str = _CPU_FLAGS,
        cpu_vendor: str = "AuthenticAMD",
    ) -> None:
        """NUMA nodes, one a socket, with consecutive CPUs, and what /proc says about them."""
        folder = "/sys/devices/system/node"
        for node in range(count):
            first = node * cpus_each
            distances = ["10" if other == node else "32" for other in range(count)]
            kib = memory_gib_each << 20
            self.files |= {
                f"{folder}/node{node}/cpulist": f"{first}-{first + cpus_each - 1}\n",
                f"{folder}/node{node}/distance": " ".join(distances) + "\n",
                f"{folder}/node{node}/meminfo": (
                    f"Node {node} MemTotal:       {kib} kB\n"
                    f"Node {node} MemFree:        {kib // 2} kB\n"
                ),
            }
        self._num_cpus = count * cpus_each
        total = count * memory_gib_each << 20
        self.files |= {
            "/sys/devices/system/node/online": f"0-{count - 1}\n" if count > 1 else "0\n",
            "/proc/meminfo": f"MemTotal:       {total} kB\nMemAvailable:   {total // 2} kB\n",
            "/proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t0-{self._num_cpus - 1}\n",
            "/proc/cpuinfo": "\n".join(
                f"processor\t: {n}\nvendor_id\t: {cpu_vendor}\nmodel name\t: {cpu}\n"
                f"flags\t\t: {cpu_flags}\n"
                for n in range(self._num_cpus)
            ),
        }

    # PCI

    def host_bridge(self, numa: int = 0) -> HostBridge:
        """A host bridge of a socket."""
        return HostBridge(self._take_bus(), numa)

    def root_port(
        self,
        *,
        numa: int = 0,
        host_bridge: HostBridge | None = None,
        link: str = "5.0 x16",
        max_link: str = "",
        ids: str = "1022:14ab",
    ) -> Port:
        """A root port: what is plugged into it has the link `link`."""
        bridge = host_bridge or self.host_bridge(numa)
        return self._port(bridge, bridge.path, bridge.bus, ids, link, max_link)

    def switch(
        self,
        *,
        behind: Port | HostBridge | None = None,
        numa: int = 0,
        link: str = "4.0 x16",
        ids: str = "1000:c010",
    ) -> Port:
        """A switch with its upstream port at `link`; each thing behind it gets a port of it."""
        above = behind if isinstance(behind, Port) else None
        if above is None:
            above = self.root_port(
                numa=numa, host_bridge=behind if isinstance(behind, HostBridge) else None, link=link
            )
        elif above.is_switch:
            above = self._port_below(above, ids, link)
        return self._port_below(above, ids, link, is_switch=True)

    def device(
        self,
        ids: str,
        *,
        behind: Port | HostBridge | None = None,
        numa: int = 0,
        subsystem: str = "",
        pci_class: str = "0x030200",
        link: str = "5.0 x16",
        max_link: str = "",
        port_max_link: str = "",
        driver: str = "",
        revision: str = "0xa1",
        has_numa_node: bool = True,
    ) -> str:
        """One PCI device; its address.

        Args:
            ids: vendor:device, in hexadecimal.
            behind: a port or switch; a root port of its own by default.
            numa: the socket, where `behind` does not say it.
            subsystem: vendor:device of the card; `ids` by default.
            link: what the link was trained to, "5.0 x16"; empty if sysfs does not say.
            max_link: what the device can do; `link` by default.
            port_max_link: what the port above can do; `max_link` by default.
            driver: the kernel driver bound to it; also adds `/sys/module/<driver>`.
            has_numa_node: False for -1, as in virtual machines.
        """
        max_link = max_link or link
        if behind is None or isinstance(behind, HostBridge):
            behind = self.root_port(
                numa=numa, host_bridge=behind, link=link, max_link=port_max_link or max_link
            )
        elif behind.is_switch:
            behind = self._port_below(behind, "1000:c010", link, max_link=port_max_link or max_link)
        address, path = self._slot_below(behind)
        numa_node = behind.numa if has_numa_node else -1
        self._function(path, ids, pci_class, numa_node, link, max_link)
        card = (subsystem or ids).split(":")
        self.files |= {
            f"{path}/subsystem_vendor": f"0x{card[0]}\n",
            f"{path}/subsystem_device": f"0x{card[1]}\n",
            f"{path}/revision": f"{revision}\n",
        }
        self.links[f"/sys/bus/pci/devices/{address}"] = path
        if driver:
            self.links[f"{path}/driver"] = f"/sys/bus/pci/drivers/{driver}"
            self.nodes |= {f"/sys/bus/pci/drivers/{driver}/{address}"}
            self.kernel_module(driver)
        return address

    def devices(
        self,
        count: int,
        ids: str,
        *,
        behind: Port | HostBridge | None = None,
        numa: int = 0,
        subsystem: str = "",
        pci_class: str = "0x030200",
        link: str = "5.0 x16",
        max_link: str = "",
        driver: str = "",
    ) -> list[str]:
        """Several devices of one kind; their addresses. See `device`."""
        return [
            self.device(
                ids,
                behind=behind,
                numa=numa,
                subsystem=subsystem,
                pci_class=pci_class,
                link=link,
                max_link=max_link,
                driver=driver,
            )
            for _ in range(count)
        ]

    def path_of(self, address: str) -> str:
        """The folder of a PCI device under /sys/devices."""
        return self.links[f"/sys/bus/pci/devices/{address}"]

    def device_node(
        self, address: str, node: str, *, subsystem: str, is_given: bool = True
    ) -> None:
        """A character device that the kernel ties to a PCI device, as it does for /dev/dri and
        /dev/accel. Without `is_given` it is in sysfs, but not in /dev: a container lacks it."""
        relative = node.removeprefix("/dev/")
        folder = f"{self.path_of(address)}/{subsystem}/{relative.rsplit('/', 1)[-1]}"
        number = f"{226 + len(subsystem)}:{128 + len(self.files)}"
        self.files[f"{folder}/dev"] = f"{number}\n"
        major, minor = number.split(":")
        self.files[f"{folder}/uevent"] = f"MAJOR={major}\nMINOR={minor}\nDEVNAME={relative}\n"
        self.links[f"/sys/class/{subsystem}/{folder.rsplit('/', 1)[-1]}"] = folder
        self.links[f"{folder}/device"] = self.path_of(address)
        if is_given:
            self.node(node)

    # Files, software, commands

    def file(self, path: str, text: str) -> None:
        """A file."""
        self.files[path] = text

    def unreadable(self, path: str) -> None:
        """A file or folder that exists and cannot be read."""
        self.files[path] = None

    def node(self, *paths: str) -> None:
        """Device nodes, sockets; with a `/` at the end, empty folders."""
        self.nodes |= set(paths)

    def link(self, path: str, target: str) -> None:
        """A symbolic link."""
        self.links[path] = target

    def kernel_module(self, name: str, version: str = "") -> None:
        """A loaded kernel module: `/sys/module/<name>`."""
        self.nodes.add(f"/sys/module/{name}")
        if version:
            self.files[f"/sys/module/{name}/version"] = f"{version}\n"

    def package(
        self,
        name: str,
        version: str,
        *,
        modules: Iterable[str] = (),
        files: Mapping[str, str | None] | None = None,
    ) -> None:
        """An installed Python distribution, its top-level modules and some of its files."""
        self.packages[name] = version
        self.modules |= set(modules)
        if files:
            self.package_files.setdefault(name, {}).update(files)

    def python_modules(self, *names: str) -> None:
        """Top-level modules that can be imported, whatever brought them."""
        self.modules |= set(names)

    def command(
        self,
        command: str | Sequence[str],
        stdout: str = "",
        *,
        exit_code: int = 0,
        stderr: str = "",
    ) -> None:
        """A command line and what it prints."""
        words = command if isinstance(command, str) else " ".join(command)
        self.commands[words] = CommandOutput(exit_code, stdout, stderr)

    def hung_command(self, command: str | Sequence[str]) -> None:
        """A command that never ends, as tools of a hung driver do."""
        words = command if isinstance(command, str) else " ".join(command)
        self.commands[words] = None

    def environ(self, **variables: str) -> None:
        """Environment variables."""
        self.environment |= variables

    # Details

    def _take_bus(self) -> int:
        self._next_bus += 1
        return self._next_bus - 1

    def _slot_below(self, port: Port) -> tuple[str, str]:
        address = f"0000:{port.secondary_bus:02x}:{port.next_slot:02x}.0"
        port.next_slot += 1
        return address, f"{port.path}/{address}"

    def _port(
        self, bridge: HostBridge, above: str, bus: int, ids: str, link: str, max_link: str
    ) -> Port:
        address = f"0000:{bus:02x}:{bridge.next_slot:02x}.1"
        bridge.next_slot += 1
        port = Port(address, f"{above}/{address}", bridge.numa, self._take_bus())
        self._bridge_function(port, ids, link, max_link)
        return port

    def _port_below(
        self, above: Port, ids: str, link: str, *, max_link: str = "", is_switch: bool = False
    ) -> Port:
        address, path = self._slot_below(above)
        port = Port(address, path, above.numa, self._take_bus(), is_switch=is_switch)
        self._bridge_function(port, ids, link, max_link)
        return port

    def _bridge_function(self, port: Port, ids: str, link: str, max_link: str) -> None:
        self._function(port.path, ids, "0x060400", port.numa, link, max_link or link)
        self.links[f"/sys/bus/pci/devices/{port.address}"] = port.path
        self.links[f"{port.path}/driver"] = "/sys/bus/pci/drivers/pcieport"

    def _function(
        self, path: str, ids: str, pci_class: str, numa_node: int, link: str, max_link: str
    ) -> None:
        vendor, device = ids.split(":")
        self.files |= {
            f"{path}/vendor": f"0x{vendor}\n",
            f"{path}/device": f"0x{device}\n",
            f"{path}/class": f"{pci_class}\n",
            f"{path}/numa_node": f"{numa_node}\n",
        }
        for prefix, text in (("current", link), ("max", max_link)):
            if text:
                generation, width = text.split(" x")
                speed = _GT_PER_S[int(float(generation))]
                self.files[f"{path}/{prefix}_link_speed"] = f"{speed} GT/s PCIe\n"
                self.files[f"{path}/{prefix}_link_width"] = f"{width}\n"
