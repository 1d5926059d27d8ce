"""No serial number, address or name gets through; what detection reads does."""

from __future__ import annotations

import random
import re
import string
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.host import CommandOutput, RecordedHost
from hal.host_scrubbing import Identity, scrubbed

_RANDOM = random.Random()


def _serial() -> str:
    return "".join(_RANDOM.choice(string.digits) for _ in range(13))


def _word(length: int = 9) -> str:
    return "".join(_RANDOM.choice(string.ascii_lowercase) for _ in range(length))


class Secrets:
    """Fresh secrets of every kind; each may be used in several places."""

    def __init__(self) -> None:
        self.serial = _serial()
        self.board_serial = f"692{_serial()}"
        self.letters = "AK" + _serial()
        self.uuid = str(uuid.uuid4())
        self.other_uuid = str(uuid.uuid4())
        self.unique_id = f"0x{_RANDOM.getrandbits(64) | 1 << 63:016x}"
        self.die_id = " ".join(f"{_RANDOM.getrandbits(32) | 1 << 31:08X}" for _ in range(5))
        pairs = [f"{_RANDOM.randrange(16, 256):02x}" for _ in range(6)]
        self.mac = ":".join(pairs)
        self.device_serial = "-".join([*pairs, "ff", "a1"])
        self.ip = (
            f"10.{_RANDOM.randrange(1, 255)}.{_RANDOM.randrange(256)}.{_RANDOM.randrange(256)}"
        )
        self.ip6 = f"fe80::{_RANDOM.randrange(4096, 65536):x}:{_RANDOM.randrange(4096, 65536):x}"
        self.host = f"{_word()}-07"
        self.user = _word()
        self.colleague = _word()
        self.email = f"{_word()}@{_word()}.org"

    @property
    def identity(self) -> Identity:
        return Identity(
            frozenset({f"{self.host}.{_word()}.internal", self.host}),
            frozenset({self.user}),
            frozenset({f"/data/{self.user}"}),
        )


def _scrub(text: str, secrets: Secrets, command: str = "tool") -> str:
    host = RecordedHost(commands={command: CommandOutput(0, text, text)})
    output = scrubbed(host, secrets.identity).run_command([command], 1)
    assert output is not None
    return output.stdout


# (what prints it, its output with {secrets}, words that must stay)
OUTPUTS = {
    "nvidia-smi -L": (
        "GPU 0: NVIDIA RTX PRO 6000 Blackwell Server Edition (UUID: GPU-{uuid})\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-{other_uuid})\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-{uuid})\n",
        ["GPU 0: NVIDIA RTX PRO 6000 Blackwell Server Edition (UUID: GPU-", "MIG 1g.10gb"],
    ),
    "nvidia-smi -q": (
        "Driver Version                            : 580.65.06\n"
        "CUDA Version                              : 13.0\n"
        "GPU 00000000:17:00.0\n"
        "    Product Name                          : NVIDIA L40S\n"
        "    Serial Number                         : {serial}\n"
        "    GPU UUID                              : GPU-{uuid}\n"
        "    GPU PDI                               : {unique_id}\n"
        "    Minor Number                          : 0\n"
        "    VBIOS Version                         : 95.02.66.00.02\n"
        "    Board Part Number                     : 900-2G133-0080-000\n"
        "        Chassis Serial Number             : N/A\n"
        "        Chassis Serial Number             : {letters}\n"
        "        Bus Id                            : 00000000:17:00.0\n"
        "        Process ID                        : 4242\n"
        "            Name                          : /home/{colleague}/venv/bin/python\n",
        ["580.65.06", "95.02.66.00.02", "NVIDIA L40S", "00000000:17:00.0", "900-2G133-0080-000"],
    ),
    "nvidia-smi -q -x": (
        "<gpu id='00000000:17:00.0'><product_name>NVIDIA L40S</product_name>\n"
        "<serial>{serial}</serial><uuid>GPU-{uuid}</uuid><vbios_version>95.02.66.00.02"
        "</vbios_version><board_serial>{board_serial}</board_serial></gpu>\n",
        ["<product_name>NVIDIA L40S</product_name>", "<serial>", "95.02.66.00.02"],
    ),
    "nvidia-smi --query-gpu=index,name,serial,uuid,pci.bus_id,vbios_version --format=csv": (
        "index, name, serial, uuid, pci.bus_id, vbios_version\n"
        "0, NVIDIA L40S, {serial}, GPU-{uuid}, 00000000:17:00.0, 95.02.66.00.02\n"
        "1, NVIDIA L40S, [N/A], GPU-{other_uuid}, 00000000:18:00.0, 95.02.66.00.02\n",
        ["0, NVIDIA L40S, ", "00000000:18:00.0", ", [N/A], "],
    ),
    "nvidia-smi --query-gpu=name,serial,driver_version --format=csv,noheader": (
        "NVIDIA L40S, {serial}, 580.65.06\nNVIDIA L40S, {letters}, 580.65.06\n",
        ["NVIDIA L40S, ", ", 580.65.06\n"],
    ),
    "npu-smi info -t board -i 0": (
        "\tNPU ID                         : 0\n"
        "\tProduct Name                   : Atlas 800T A2\n"
        "\tSerial Number                  : {letters}\n"
        "\tSoftware Version               : 25.2.0.1\n"
        "\tFirmware Version               : 7.7.0.6.236\n"
        "\tBoard ID                       : 0x30\n"
        "\tPCIe Bus Info                  : 0000:C1:00.0\n"
        "\tVDie ID                        : {die_id}\n"
        "\tSN:                              {serial}\n",
        ["Atlas 800T A2", "25.2.0.1", "7.7.0.6.236", "0x30", "0000:C1:00.0"],
    ),
    "amd-smi static --json": (
        '[{{"gpu": 0, "asic": {{"market_name": "AMD Instinct MI300X", "device_id": "0x74a1", '
        '"asic_serial": "{unique_id}", "oam_id": 0}}, "board": {{"model_number": '
        '"102-G30211-0C", "product_serial": "{board_serial}"}}, "bus": {{"bdf": "0000:05:00.0"}}, '
        '"driver": {{"version": "6.12.12"}}, "uuid": "{uuid}"}}]\n',
        [
            "AMD Instinct MI300X",
            "0x74a1",
            "102-G30211-0C",
            "0000:05:00.0",
            "6.12.12",
            '"oam_id": 0',
        ],
    ),
    "rocm-smi": (
        "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X\n"
        "GPU[0]\t\t: GFX Version: \t\tgfx942\n"
        "GPU[0]\t\t: Unique ID: {unique_id}\n"
        "GPU[0]\t\t: Serial Number: {board_serial}\n",
        ["AMD Instinct MI300X", "gfx942", "Unique ID: 0x"],
    ),
    "rocminfo": (
        "  Uuid:                    GPU-{unique_id}\n  Name:                    gfx942\n",
        ["gfx942"],
    ),
    "hl-smi -Q name,serial -f csv": (
        "name, serial, uuid\nHL-225, {letters}, 01P0-HL2080A0-15-TNPS34-{serial}\n",
        ["HL-225"],
    ),
    "xpu-smi discovery": (
        "| 0         | Device Name: Intel(R) Arc(TM) Pro B60 Graphics     |\n"
        "|           | Serial Number: {letters}                 |\n"
        "|           | SOC UUID: {uuid}     |\n"
        "|           | PCI BDF Address: 0000:4d:00.0            |\n",
        ["Intel(R) Arc(TM) Pro B60 Graphics", "0000:4d:00.0"],
    ),
    "cnmon info": (
        "    Product Name                   : MLU590-M9\n"
        "    SN                             : {unique_id}\n"
        "    UUID                           : MLU-{uuid}\n"
        "    Firmware                       : v1.1.4\n",
        ["MLU590-M9", "v1.1.4"],
    ),
    "lspci -vv": (
        "05:00.0 Processing accelerators: Advanced Micro Devices, Inc. Device 74a1\n"
        "\tCapabilities: [100 v1] Device Serial Number {device_serial}\n"
        "00:16.3 Serial controller: Intel Corporation\n",
        ["Device 74a1", "00:16.3 Serial controller: Intel Corporation"],
    ),
    "anything": (
        "inet {ip}/24 brd {ip} ether {mac} inet6 {ip6} scope link\n"
        "hostname: {host}\n{user}@{host}:~$ ls /home/{user}/x /data/{user}/y /home/{colleague}\n"
        "GUID={mac}:00:03 mail {email} Linux {host} 6.8.0-45-generic\n"
        "torch 2.9.0+cu129 cudnn version 9.10.2.21 libcuda.so.580.65.06\n",
        ["inet", "6.8.0-45-generic", "2.9.0+cu129", "9.10.2.21", "580.65.06"],
    ),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_secret_gets_through_and_the_rest_stays(command: str) -> None:
    secrets = Secrets()
    template, words = OUTPUTS[command]
    values = dict(vars(secrets))
    scrubbed_text = _scrub(template.format(**values), secrets, command)
    for name, value in values.items():
        assert value.lower() not in scrubbed_text.lower(), (name, value, scrubbed_text)
    for word in words:
        assert word in scrubbed_text
    assert scrubbed_text.count("\n") == template.count("\n")
    assert _scrub(scrubbed_text, secrets, command) == scrubbed_text


def test_equal_stays_equal_and_different_stays_different() -> None:
    secrets = Secrets()
    host = RecordedHost(
        environment={
            "CUDA_VISIBLE_DEVICES": f"GPU-{secrets.other_uuid}",
            "ACME_API_TOKEN": "hush",
            "LD_LIBRARY_PATH": f"/home/{secrets.user}/lib:/usr/lib",
        },
        commands={
            "nvidia-smi -L": CommandOutput(
                0,
                f"GPU 0: x (UUID: GPU-{secrets.uuid})\nGPU 1: x (UUID: GPU-{secrets.other_uuid})\n",
                "",
            )
        },
    )
    after = scrubbed(host, secrets.identity)
    output = after.run_command(["nvidia-smi", "-L"], 1)
    assert output is not None
    first, second = re.findall(r"UUID: (GPU-\S+)\)", output.stdout)
    assert first != second == after.environ("CUDA_VISIBLE_DEVICES")
    assert after.environ("ACME_API_TOKEN") == "scrubbed"
    assert after.environ("LD_LIBRARY_PATH") == "/home/user/lib:/usr/lib"


def test_paths_and_whole_files() -> None:
    secrets = Secrets()
    host = RecordedHost(
        files={
            "/sys/bus/pci/devices/0000:05:00.0/unique_id": f"{secrets.unique_id}\n",
            "/sys/bus/pci/devices/0000:05:00.0/vendor": "0x1002\n",
            "/sys/class/net/eth0/address": f"{secrets.mac}\n",
            "/etc/hostname": f"{secrets.host}\n",
            f"/home/{secrets.user}/acme/version": "1.2.3.4 version 2.0.0.1\n",
            f"/opt/acme/{secrets.uuid}/driver": "1",
        },
        links={f"/home/{secrets.user}/current": f"/home/{secrets.user}/acme"},
        nodes=frozenset({"/dev/nvidia0"}),
        packages={"torch": "2.7.1.8"},
        package_files={"torch": {"torch/version.py": "__version__ = '2.7.1.8'\nhip = None\n"}},
        modules=frozenset({"torch"}),
    )
    after = scrubbed(host, secrets.identity)
    text = after.to_json()
    for value in vars(secrets).values():
        assert value not in text
    folder = "/sys/bus/pci/devices/0000:05:00.0"
    assert after.read_text(f"{folder}/vendor") == "0x1002\n"
    assert re.fullmatch(r"0x0{15}\d\n", after.read_text(f"{folder}/unique_id") or "")
    assert after.read_link("/home/user/current") == "/home/user/acme"
    assert after.read_text("/home/user/current/version") == "192.0.2.1 version 2.0.0.1\n"
    assert after.package_version("torch") == "2.7.1.8"
    assert (
        after.package_file("torch", "torch/version.py") == "__version__ = '2.7.1.8'\nhip = None\n"
    )
    assert after.exists("/dev/nvidia0")


def test_common_names_do_not_eat_the_output() -> None:
    secrets = Secrets()
    host = RecordedHost(commands={"x": CommandOutput(0, "GPU 0 of user root on server", "")})
    identity = Identity(frozenset({"gpu", "server"}), frozenset({"root", "user"}), frozenset())
    assert scrubbed(host, identity) == host
    assert _scrub(f"my{secrets.user}s", secrets) == f"my{secrets.user}s"  # whole words only


@given(st.text(max_size=300), st.text(max_size=20))
@settings(deadline=None)
def test_any_text_is_scrubbed_once(text: str, name: str) -> None:
    identity = Identity(frozenset({name}), frozenset({name[::-1]}), frozenset({f"/{name}"}))
    host = RecordedHost(commands={"x": CommandOutput(0, text, "")})
    once = scrubbed(host, identity)
    assert scrubbed(once, identity).commands.keys() == once.commands.keys()
    assert RecordedHost.from_json(once.to_json()).commands.keys() == once.commands.keys()


def test_long_lines_take_no_long_time() -> None:
    """Flags of a CPU: thousands of words, none of them a secret."""
    flags = "flags : " + " ".join(_word(8) for _ in range(300)) + "\n"
    host = RecordedHost(files={"/proc/cpuinfo": flags * 256})
    assert scrubbed(host, Identity()) == host


def test_keys_of_services_go() -> None:
    secret = "".join(_RANDOM.choice(string.ascii_letters + string.digits) for _ in range(24))
    text = (
        f"python serve.py --api-key={secret} --token={secret} hf_{secret}\n"
        f'{{"password": "{secret}", "secret" : "{secret}"}}\n'
        f"https://someone:{secret}@example.org/x gh: ghp_{secret} AKIA{secret.upper()}\n"
        "max_tokens: 512, tokenizer: x.json, ssh-keygen, sk-1, https://example.org/a@b\n"
    )
    names = ("HF_TOKEN", "WANDB_API_KEY", "MY_PAT", "REGISTRY_AUTH", "SENTRY_DSN", "PATH")
    host = RecordedHost(
        commands={"tool": CommandOutput(0, text, text)},
        environment={name: secret if name != "PATH" else text for name in names},
    )
    clean = scrubbed(host, Identity()).to_json()
    assert secret.lower() not in clean.lower()
    for kept in ("max_tokens: 512", "tokenizer: x.json", "ssh-keygen", "//example.org/a@b"):
        assert kept in clean
