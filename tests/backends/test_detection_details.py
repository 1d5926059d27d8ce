"""What detection reads of a device on particular hosts: links, visibility, memory, software."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accelerator_plugins import Found, look_at
from hal.device import Confidence, DeviceSpec
from hal.host import CommandOutput, RecordedHost
from hal.topology import detect_topology
from host_catalogue import compose
from tool_outputs import NVIDIA_SMI, uuid_of


def _found(name: str, **environment: str) -> Found:
    host = compose(name)[0]
    if environment:
        host = replace(host, environment={**host.environment, **environment})
    return look_at(host)


def _specs(found: Found) -> list[DeviceSpec]:
    return [found.specs[key] for key in sorted(found.specs)]


def test_link_trained_below_its_capability() -> None:
    specs = _specs(_found("rtx-4090-x8"))
    assert [spec.attributes["host_link_trained"] for spec in specs[:7]] == ["PCIe 4.0 x16"] * 7
    narrow = specs[7]
    assert narrow.attributes["host_link"] == "PCIe 4.0 x16"
    assert narrow.attributes["host_link_trained"] == "PCIe 4.0 x4"
    assert "trained to x4, both ends can do x16" in narrow.evidence["attributes.host_link"].found
    rate = float(specs[0].attributes["host_link_bytes_per_s"])
    assert float(narrow.attributes["host_link_bytes_per_s"]) == pytest.approx(rate / 4)
    # 16 GT/s, 128 of 130 bits, 16 lanes, 8 bits a byte
    assert rate == pytest.approx(16e9 * 128 / 130 * 16 / 8)


def test_idle_link_keeps_its_rate() -> None:
    spec = _specs(_found("l40s-x4-switch"))[0]
    assert spec.attributes["host_link_trained"] == "PCIe 1.0 x16"
    assert "look again under load" in spec.evidence["attributes.host_link"].found
    assert float(spec.attributes["host_link_bytes_per_s"]) > 31e9


def test_intel_card_has_the_link_of_its_slot() -> None:
    for spec in _specs(_found("arc-b60-x4")):
        assert spec.attributes["host_link"] == "PCIe 5.0 x8"
        assert spec.attributes["host_link_trained"] == "PCIe 5.0 x8"
    found = _found("arc-b60-x4")
    topology = detect_topology(compose("arc-b60-x4")[0], list(found.specs.values()))
    assert [one.link.describe() for one in topology.accelerators if one.link] == ["gen5 x8"] * 4


def test_numa_nodes() -> None:
    nodes = [spec.attributes["numa_node"] for spec in _specs(_found("rtx-pro-6000-x8"))]
    assert nodes == [0] * 4 + [1] * 4


def test_memory_and_units_are_the_probed_ones() -> None:
    spec = _specs(_found("rtx-pro-6000-x8"))[0]
    assert spec.memory_bytes == 97887 << 20
    assert "nvidia-smi" in spec.evidence["memory_bytes"].source
    assert spec.attributes["driver_version"] == "580.95.05"
    assert spec.attributes["ecc_mode"] == "Enabled"
    assert spec.software == {
        "torch": "2.9.0+cu128",
        "triton": "3.5.0",
        "flashinfer-python": "0.7.4",
    }
    amd = _specs(_found("mi300x-x8"))[0]
    assert amd.memory_bytes == 206141652992
    assert amd.num_cores == 304
    assert amd.arch == "gfx942"


def test_kunlunxin_memory_is_the_cards() -> None:
    assert {spec.memory_bytes for spec in _specs(_found("kunlunxin-p800-x8"))} == {98304 << 20}


def test_one_card_of_two_chips_is_two_devices() -> None:
    ids = list(_found("ascend-310p").specs)
    assert len(ids) == 2
    assert all("#" in device for device in ids)
    arrays = _found("tecorigin-t1").specs
    assert sorted(device.rsplit("#", 1)[1] for device in arrays) == ["0", "1", "2", "3"]


def test_another_product_of_a_shared_pci_id_is_not_the_best_known_one() -> None:
    spec = _specs(_found("rx-7900-gre"))[0]
    assert spec.name == "AMD Radeon RX 7900 GRE"
    assert spec.arch == "gfx1100"
    assert not spec.peak_flops
    assert spec.memory_bytes == 17163091968


def test_pci_decides_whose_gfx906_it_is() -> None:
    assert set(_found("amd-mi50").devices) == {"amd"}
    assert set(_found("hygon-z100").devices) == {"hygon"}


def _ordinals(found: Found) -> list[object]:
    return [spec.attributes.get("visible_ordinal") for spec in _specs(found)]


def test_all_devices_are_visible_without_a_variable() -> None:
    found = _found("l40s-x4-switch")
    assert _ordinals(found) == [0, 1, 2, 3]
    assert [spec.torch_device for spec in _specs(found)] == [f"cuda:{n}" for n in range(4)]


def test_hidden_devices_are_reported_as_hidden() -> None:
    found = _found("nvidia-hidden")
    assert _ordinals(found) == [-1, 1, -1, 0]
    hidden = _specs(found)[0]
    assert str(hidden.attributes["hidden_by"]).startswith("CUDA_VISIBLE_DEVICES=3,GPU-")
    seen = [e.found for e in found.devices["nvidia"][0].evidence if "CUDA" in e.source]
    assert len(seen) == 1
    assert "hides it" in seen[0]


@pytest.mark.parametrize(
    ("value", "ordinals"),
    [
        ("0", [0, -1, -1, -1]),
        ("3,2,1,0", [3, 2, 1, 0]),
        (" 1 , 3 ", [-1, 0, -1, 1]),
        ("", [-1] * 4),
        ("-1", [-1] * 4),
        ("NoDevFiles", [-1] * 4),
        (uuid_of(2)[:12], [-1, -1, 0, -1]),
    ],
)
def test_values_of_cuda_visible_devices(value: str, ordinals: list[int]) -> None:
    assert _ordinals(_found("l40s-x4-switch", CUDA_VISIBLE_DEVICES=value)) == ordinals


@pytest.mark.parametrize(
    "value", ["4", "0,0", "0,,1", "all", "0;1", "GPU-", "MIG-1234", "0-3", "GPU-ffff", "１"]
)
def test_wrong_values_are_errors(value: str) -> None:
    found = _found("l40s-x4-switch", CUDA_VISIBLE_DEVICES=value)
    assert not found.devices
    text = found.refused["nvidia"].one_line()
    assert "CUDA_VISIBLE_DEVICES" in text
    assert repr(value) in text


def test_amd_variables_apply_one_after_the_other() -> None:
    found = _found("mi300x-x8", ROCR_VISIBLE_DEVICES="7,6,5,4", HIP_VISIBLE_DEVICES="1,0")
    assert _ordinals(found) == [-1] * 6 + [0, 1]
    both = _found("mi300x-x8", HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")
    assert "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES" in both.refused["amd"].one_line()
    same = _found("mi300x-x8", HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="1")
    assert _ordinals(same) == [-1, 0] + [-1] * 6


def test_unlike_devices_have_no_ordinal_until_their_order_is_set() -> None:
    unknown = _specs(_found("mixed-nvidia-models"))
    assert [spec.torch_device for spec in unknown] == ["cuda", "cuda"]
    assert "CUDA_DEVICE_ORDER" in unknown[0].evidence["attributes.visible_ordinal"].found
    refused = _found("mixed-nvidia-models", CUDA_VISIBLE_DEVICES="1").refused["nvidia"]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in refused.one_line()
    known = _found("mixed-nvidia-models", CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1")
    assert _ordinals(known) == [-1, 0]


def test_npus_are_numbered_by_the_tool_and_not_by_address() -> None:
    found = _found("ascend-910b-x8")
    assert _ordinals(found) == [4, 5, 6, 7, 0, 1, 2, 3]


def test_gaudi_is_chosen_by_module() -> None:
    """Modules 0, 2 and 6 are the third, fourth and first device by address."""
    assert _ordinals(_found("gaudi3-x8")) == [2, -1, 0, 1, -1, -1, -1, -1]


def test_profiles_of_every_family() -> None:
    from accelerator_plugins import BACKENDS, plugin
    from hal_capability_db import load_database

    profiles = [spec for backend in BACKENDS for spec in plugin(backend).device_profiles()]
    ids = [spec.device_id for spec in profiles]
    assert sorted(ids) == sorted(load_database().devices)
    assert all(spec.software.get("torch") for spec in profiles)


def test_nothing_is_read_of_a_host_without_the_vendors_hardware() -> None:
    found = look_at(RecordedHost())
    assert not found.devices
    assert not found.missing
    assert not found.refused


def _with_tool(name: str, command: str, output: CommandOutput) -> Found:
    host = compose(name)[0]
    return look_at(replace(host, commands={**host.commands, command: output}))


def test_a_tool_whose_table_is_not_understood_hides_no_card() -> None:
    """Names, memory and order then come from elsewhere, and the evidence says so."""
    output = CommandOutput(0, "GPU table in another form\n", "")
    found = _with_tool("l40s-x4-switch", NVIDIA_SMI, output)
    assert found.products() == {"nvidia": {"l40s": 4}}
    assert any("no device in its answer" in e.found for e in found.devices["nvidia"][0].evidence)
    assert found.specs["0000:03:00.0"].memory_bytes == 48305799168


def test_a_tool_of_another_vendor_by_the_same_name_proves_nothing() -> None:
    wrong = CommandOutput(1, "", "The following argument was not expected: discovery\n")
    found = _with_tool("arc-b60-x4", "xpu-smi discovery -j", wrong)
    assert found.products() == {"intel_xpu": {"intel-arc-pro-b60": 4}}
    assert not found.missing


def test_a_failing_tool_where_sysfs_is_hidden_is_told() -> None:
    failed = CommandOutput(9, "NVIDIA-SMI has failed because it couldn't communicate\n", "")
    found = _with_tool("nvidia-sysfs-hidden", NVIDIA_SMI, failed)
    text = found.refused["nvidia"].one_line()
    assert "couldn't communicate" in text
    assert "/dev/nvidia0" in text


def test_another_vendors_torch_is_refused_where_sysfs_is_hidden() -> None:
    hidden, metax = compose("nvidia-sysfs-hidden")[0], compose("metax-c550-x8")[0]
    host = replace(hidden, packages=metax.packages, package_files=metax.package_files)
    text = look_at(host).refused["nvidia"].one_line()
    assert "/dev/nvidiactl" in text
    assert "says metax" in text


def test_links_are_those_of_this_host_and_not_of_the_product() -> None:
    full = _specs(_found("h200-x8-nvlink"))
    for spec in full:
        assert spec.attributes["fabric"] == "nvlink"
        assert spec.attributes["fabric_is_full_mesh"] == 1
        assert str(spec.attributes["fabric_peers"]).count("*18") == 7
        assert "topo -m" in spec.evidence["attributes.fabric"].source
    first, second, third, fourth = _specs(_found("h100-nvl-x4-bridges"))
    assert first.attributes["fabric_peers"] == f"{second.device_id}*12"
    assert second.attributes["fabric_is_full_mesh"] == 0
    for alone in (third, fourth):
        assert alone.attributes["fabric"] == "none"
        assert "fabric_bytes_per_s" not in alone.attributes
    mesh = _specs(_found("mi300x-x8"))
    assert {spec.attributes["fabric_is_full_mesh"] for spec in mesh} == {1}
    assert len(str(mesh[0].attributes["fabric_peers"]).split()) == 7


def test_npu_smi_tells_which_npus_hccs_links() -> None:
    found = _specs(_found("ascend-910b-x8"))
    for spec in found:
        others = {other.device_id for other in found} - {spec.device_id}
        assert set(str(spec.attributes["fabric_peers"]).split()) == others
        assert spec.attributes["fabric_is_full_mesh"] == 1
        assert "npu-smi info -t topo" in spec.evidence["attributes.fabric"].source
    host = compose("ascend-910b-x8")[0]
    command = "npu-smi info -t topo"
    said = host.commands[command]
    assert said is not None
    text = said.stdout.replace("HCCS", "PHB", 1)  # of NPU 0 to NPU 1
    cut = replace(host, commands={**host.commands, command: replace(said, stdout=text)})
    linked = _specs(look_at(cut))
    assert sorted(len(str(s.attributes["fabric_peers"]).split()) for s in linked) == [6, *[7] * 7]
    assert {spec.attributes["fabric_is_full_mesh"] for spec in linked} == {0}


@pytest.mark.parametrize("text", ["", "GPU0\tnonsense\n", "\tGPU0\tGPU1\nGPU0\t X \tNV18\n"])
def test_an_unclear_matrix_leaves_what_the_product_may_have(text: str) -> None:
    found = _with_tool("h200-x8-nvlink", "nvidia-smi topo -m", CommandOutput(0, text, ""))
    for spec in found.specs.values():
        assert spec.attributes["fabric"] == "nvlink"
        assert "fabric_peers" not in spec.attributes
        assert spec.evidence["attributes.fabric"].confidence is Confidence.DATABASE
