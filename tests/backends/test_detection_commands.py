"""`hal devices` and `hal doctor` over recorded hosts, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

from host_catalogue import FOLDER


def _hal(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from hal.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
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


def test_a_plan_is_for_the_recorded_host_and_not_for_this_one() -> None:
    """Looking for the command `plan` looks at this host's plug-ins first."""
    recorded = str(FOLDER / "rx-7900-gre.json")
    done = _hal("plan", "smollm2-135m-instruct", "--host", recorded, "--json", "-")
    assert "AMD Radeon RX 7900 GRE" in done.stdout, done.stderr
