"""`hal devices` and `hal doctor` over recorded hosts, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from host_catalogue import FOLDER


def _hal(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from hal.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_evidence_is_printed() -> None:
    done = _hal("devices", "--host", str(FOLDER / "kunlunxin-p800-x8.json"), "--evidence", "--json")
    assert done.returncode == 0, done.stderr
    specs = {spec["device_id"]: spec for spec in json.loads(done.stdout)}
    cards = [spec for spec in specs.values() if spec["backend"] == "kunlunxin"]
    assert len(cards) == 8
    for spec in cards:
        seen = [spec["evidence"][f"detection.{n}"] for n in range(1, 6)]
        assert "1d22:3688" in seen[0]["found"]
        assert "2.9.0+cu129" in seen[2]["found"]
        assert "xpu-smi" in seen[3]["source"]
        assert "kunlunxin-p800" in seen[4]["found"]
    shown = _hal("devices", "--host", str(FOLDER / "l40s-x4-switch.json"), "--evidence").stdout
    assert "detection.1" in shown


def test_equal_cards_are_described_once_and_doubtful_rates_are_marked() -> None:
    shown = " ".join(_hal("devices", "--host", str(FOLDER / "rtx-pro-6000-x8.json")).stdout.split())
    assert shown.count("as above") == 7
    assert "0000:0f:00.0 as above" in shown
    for rate in ("bfloat16 467.8 T,", "float32 120 T?,", "fp8 935.6 T,"):
        assert rate in shown


def test_one_strange_card_hides_no_other() -> None:
    done = _hal("devices", "--host", str(FOLDER / "nvidia-one-unknown.json"))
    assert done.returncode == 1
    assert "NVIDIA L40S" in done.stdout
    assert "add it to an overlay" in done.stderr


def test_doctor_is_content_with_a_sound_host_and_not_with_a_broken_one() -> None:
    sound = _hal("doctor", "--host", str(FOLDER / "metax-c550-x8.json"), "--json")
    document = json.loads(sound.stdout)
    assert document["healthy"], document
    assert sound.returncode == 0
    broken = _hal("doctor", "--host", str(FOLDER / "ascend-half-broken.json"))
    assert broken.returncode == 1
    assert "torch_npu" in " ".join(broken.stdout.split())
    assert "reinstall" in broken.stdout


def test_doctor_folds_what_has_nothing_to_do_here() -> None:
    host = ("--host", str(FOLDER / "metax-c550-x8.json"))
    short = " ".join(_hal("doctor", *host).stdout.split())
    assert short.count("none of its devices is on this host") == 1
    assert "idle, none of its devices is on this host: amd, ascend" in short
    whole = " ".join(_hal("doctor", "--verbose", *host).stdout.split())
    assert "tecorigin halstack" in whole


def test_a_plan_is_for_the_recorded_host_and_not_for_this_one() -> None:
    """Looking for the command `plan` looks at this host's plug-ins first."""
    recorded = str(FOLDER / "rx-7900-gre.json")
    done = _hal("plan", "smollm2-135m-instruct", "--host", recorded, "--json", "-")
    assert "AMD Radeon RX 7900 GRE" in done.stdout, done.stderr


_OVERLAY = """\
schema: halstack.capability_db/1
sources: {lab: our own measurements}
devices:
  - id: r100
    family: nvidia
    name: NVIDIA R100
    arch: sm_103
    identity:
      {pci_devices: [{id: "0x3fff"}], names: [NVIDIA R100], source: [lab], confidence: measured}
    peak:
      - {values: {bfloat16: 3000}, unit: TFLOPS, source: [lab], confidence: measured}
    memory: {value: 288, unit: GB, source: [lab], confidence: measured}
"""


def test_an_overlay_makes_an_unknown_card_known(tmp_path: Path) -> None:
    """What the error about the unknown card says to do. The driver's capability is 13.0, which the
    overlay contradicts: that is refused; without one it is believed."""
    path = tmp_path / "mine.yaml"
    path.write_text(_OVERLAY)
    stored = json.loads((FOLDER / "nvidia-unknown-architecture.json").read_text())
    host = tmp_path / "host.json"
    host.write_text(json.dumps(stored))
    wrong = _hal("devices", "--host", str(host), HAL_DATABASE_OVERLAYS=str(path))
    assert "r100" not in wrong.stdout
    doctor = _hal("doctor", "--host", str(host), HAL_DATABASE_OVERLAYS=str(path)).stdout
    assert "sm_103" in doctor
    assert "sm_130" in doctor
    for command, (code, out, error) in stored["commands"].items():
        stored["commands"][command] = [code, out.replace("13.0", "10.3"), error]
    host.write_text(json.dumps(stored))
    done = _hal("devices", "--host", str(host), "--json", HAL_DATABASE_OVERLAYS=str(path))
    assert done.returncode == 0, done.stderr
    spec = next(spec for spec in json.loads(done.stdout) if spec["backend"] == "nvidia")
    assert spec["name"] == "NVIDIA R100"
    assert spec["attributes"]["profile"] == "r100"
    assert spec["peak_flops"]["bfloat16"] == 3e15
