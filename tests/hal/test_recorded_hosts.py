"""The builder of recorded hosts makes what Linux shows."""

from hal.host import RecordedHost
from recorded_hosts import HostBuilder


def test_builder_makes_a_linux_host() -> None:
    builder = HostBuilder("four cards behind one switch")
    builder.sockets(2, cpus_each=4, memory_gib_each=8)
    switch = builder.switch(numa=1, link="4.0 x16")
    cards = builder.devices(2, "10de:26b9", behind=switch, link="4.0 x8", max_link="4.0 x16")
    alone = builder.device("1002:74a1", pci_class="0x120000", driver="amdgpu", numa=1)
    builder.device_node(alone, "/dev/dri/renderD128", subsystem="drm")
    builder.kernel_module("amdgpu", "6.12.12")
    builder.package("torch", "2.9.0", modules=["torch"], files={"torch/version.py": "hip = None"})
    builder.command(["amd-smi", "list"], "GPU: 0\n")
    host = builder.build()
    assert RecordedHost.from_json(host.to_json()) == host
    assert len(set(cards)) == 2
    for card in cards:
        folder = f"/sys/bus/pci/devices/{card}"
        path = host.read_link(folder)
        assert path is not None
        assert path.startswith("/sys/devices/pci0000:")
        # host bridge, root port, upstream port, downstream port, device
        assert len(path.split("/")) == 3 + 5
        assert host.read_text(f"{folder}/vendor") == "0x10de\n"
        assert host.read_text(f"{folder}/current_link_width") == "8\n"
        assert host.read_text(f"{path}/max_link_speed") == "16.0 GT/s PCIe\n"
        assert host.read_text(f"{path}/numa_node") == "1\n"
    upstream = [host.read_link(f"/sys/bus/pci/devices/{card}") for card in cards]
    assert len({str(path).rsplit("/", 2)[0] for path in upstream}) == 1
    assert host.read_link(f"/sys/bus/pci/devices/{alone}/driver") == "/sys/bus/pci/drivers/amdgpu"
    assert host.read_text("/sys/module/amdgpu/version") == "6.12.12\n"
    assert host.exists("/dev/dri/renderD128")
    assert host.read_link("/sys/class/drm/renderD128/device") == builder.path_of(alone)
    assert host.list_dir("/sys/devices/system/node") == ("node0", "node1", "online")
    assert host.has_module("torch")
    output = host.run_command(["amd-smi", "list"], 1)
    assert output is not None
    assert output.stdout == "GPU: 0\n"
