"""Recordings: the same questions get the same answers; nothing that names a machine is written."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerator_plugins import look_at
from fresh_draws import fresh_choice
from hal.cli import main
from hal.errors import HostReadError
from hal.host import (
    CommandOutput,
    HostProbe,
    LocalHost,
    RecordedHost,
    RecordingHost,
    load_recorded_host,
)
from hal.host_capture import ask_usual_questions, identity_of_this_machine
from hal.host_scrubbing import Identity, scrubbed
from hal.plugins.survey import survey_plugins
from hal.topology import detect_topology
from host_catalogue import FOLDER
from plugin_sites import Site

HOSTS = sorted(path.stem for path in FOLDER.glob("*.json"))

Question = tuple[str, tuple[object, ...]]
_PATH = st.sampled_from(["/", "/a", "/a/b", "/a/b/c", "/a/x", "/l", "/l/c", "/l/x", "/z", "/bad"])
_QUESTIONS: st.SearchStrategy[Question] = st.one_of(
    st.tuples(st.just("read_text"), st.tuples(_PATH)),
    st.tuples(st.just("list_dir"), st.tuples(_PATH)),
    st.tuples(st.just("exists"), st.tuples(_PATH)),
    st.tuples(st.just("read_link"), st.tuples(_PATH)),
    st.tuples(st.just("environ"), st.tuples(st.sampled_from(["HOME", "NONE"]))),
    st.tuples(st.just("package_version"), st.tuples(st.sampled_from(["torch", "none"]))),
    st.tuples(st.just("has_module"), st.tuples(st.sampled_from(["torch", "none"]))),
    st.tuples(
        st.just("package_file"),
        st.tuples(st.sampled_from(["torch", "none"]), st.sampled_from(["v.py", "bad.py", "no.py"])),
    ),
    st.tuples(
        st.just("run_command"),
        st.tuples(st.sampled_from([("smi", "-L"), ("hung",), ("none",)]), st.just(1.0)),
    ),
)
RICH = RecordedHost(
    files={"/a/b/c": "text", "/a/x": "", "/bad": None},
    nodes=frozenset({"/z"}),
    links={"/l": "/a/b"},
    environment={"HOME": "/root"},
    packages={"torch": "2.9"},
    package_files={"torch": {"v.py": "1", "bad.py": None}},
    modules=frozenset({"torch"}),
    commands={"smi -L": CommandOutput(1, "out", "err"), "hung": None},
)


def _answer(host: HostProbe, question: Question) -> object:
    name, arguments = question
    try:
        return getattr(host, name)(*arguments)
    except HostReadError as error:
        return ("unreadable", error.who)


@given(st.lists(_QUESTIONS, max_size=12))
@settings(deadline=None)
def test_a_recording_answers_what_was_asked_as_the_host_did(questions: list[Question]) -> None:
    recorder = RecordingHost(RICH)
    answers = [_answer(recorder, question) for question in questions]
    assert answers == [_answer(RICH, question) for question in questions]
    recorded = RecordedHost.from_json(recorder.recorded().to_json())
    assert [_answer(recorded, question) for question in questions] == answers


def test_a_recording_has_only_what_was_asked() -> None:
    recorder = RecordingHost(RICH)
    recorder.read_text("/a/b/c")
    assert recorder.recorded() == RecordedHost(files={"/a/b/c": "text"})


@pytest.mark.parametrize("name", HOSTS)
def test_detection_finds_the_same_on_a_recording_of_a_host(name: str) -> None:
    host = load_recorded_host(FOLDER / f"{name}.json")
    recorder = RecordingHost(host)
    found = look_at(recorder)
    topology = detect_topology(recorder, found.specs.values())
    for clean in (recorder.recorded(), scrubbed(recorder.recorded(), Identity())):
        recorded = RecordedHost.from_json(clean.to_json())
        again = look_at(recorded)
        assert again.products() == found.products()
        assert again.devices.keys() == found.devices.keys()
        for backend, devices in found.devices.items():
            assert [d.device_id for d in again.devices[backend]] == [d.device_id for d in devices]
        assert again.missing == found.missing
        assert again.refused.keys() == found.refused.keys()
        assert detect_topology(recorded, again.specs.values()) == topology
        assert {key: spec.features for key, spec in again.specs.items()} == {
            key: spec.features for key, spec in found.specs.items()
        }


@pytest.fixture
def hal(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[object]], tuple[int, str, str]]:
    """Runs `hal` in this process; (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

    def run(arguments: Sequence[object]) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


Hal = Callable[[Sequence[object]], tuple[int, str, str]]


def test_this_machine_recorded_has_the_same_devices_and_no_names(hal: Hal, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    code, live, err = hal(["devices", "--topology", "--json", "--record", file])
    assert code == 0, err
    assert f"Recorded to {file}" in err
    assert hal(["devices", "--topology", "--json", "--host", file])[:2] == (0, live)
    assert json.loads(live)["topology"]["schema"] == "halstack.topology/1"
    text = file.read_text()
    identity = identity_of_this_machine()
    for name in identity.host_names | identity.user_names:
        if len(name) > 3 and name not in ("root", "localhost", "user"):
            assert not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
    assert load_recorded_host(file).package_version("torch") is not None


@pytest.mark.parametrize("name", fresh_choice(HOSTS))
def test_a_recorded_host_recorded_again(hal: Hal, tmp_path: Path, name: str) -> None:
    file = tmp_path / "again.json"
    first = hal(["devices", "--topology", "--json", "--host", FOLDER / f"{name}.json"])
    both = hal(["devices", "--json", "--host", FOLDER / f"{name}.json", "--record", file])
    assert both[0] == first[0], both[2]
    second = hal(["devices", "--topology", "--json", "--host", file])
    assert second[:2] == first[:2], second[2]
    places = (FOLDER / f"{name}.json", file)
    doctor = [hal(["doctor", "--json", "--host", place]) for place in places]
    assert doctor[0][0] == doctor[1][0]
    states = [
        {plugin["name"]: plugin["status"] for plugin in json.loads(run[1])["plugins"]}
        for run in doctor
    ]
    assert states[0] == states[1]


def test_pictures_by_the_command(hal: Hal, tmp_path: Path) -> None:
    picture = tmp_path / "topology.svg"
    host = FOLDER / "l40s-x4-switch.json"
    code, text, err = hal(["devices", "--topology", "--svg", picture, "--host", host])
    assert code == 0, err
    assert "switch" in text
    assert "shared by 4" in text
    assert "PIX" in text
    assert max(map(len, text.splitlines())) <= 100
    assert picture.read_text().startswith("<svg ")
    code, _, err = hal(["devices", "--svg", tmp_path / "no" / "x.svg", "--host", host])
    assert code == 2
    assert "a file that can be written" in err


def test_a_container_that_was_not_given_its_cards(hal: Hal) -> None:
    host = FOLDER / "nvidia-container-2-of-8.json"
    code, text, _ = hal(["devices", "--topology", "--host", host])
    assert code == 0
    assert text.count("not usable") == 6
    assert "device node" in text
    code, text, _ = hal(["doctor", "--host", host])
    assert code == 1
    assert "device node" in text


def test_an_accelerator_that_nobody_claims_is_noted(hal: Hal, tmp_path: Path) -> None:
    from recorded_hosts import HostBuilder

    builder = HostBuilder("a card of a vendor to come")
    card = builder.device("abcd:1234", pci_class="0x120000", driver="acme")
    file = tmp_path / "host.json"
    file.write_text(builder.build().to_json())
    _, text, _ = hal(["doctor", "--host", file])
    assert f"0xabcd:0x1234 at {card} (class 0x120000, driver acme)" in " ".join(text.split())
    document = json.loads(hal(["doctor", "--json", "--host", file])[1])
    assert [item["address"] for item in document["unclaimed"]] == [card]


def test_options_that_need_this_machine(hal: Hal, tmp_path: Path) -> None:
    host = FOLDER / "cpu-only.json"
    for arguments in (["devices", "--measure"], ["doctor", "--self-test"]):
        code, _, err = hal([*arguments, "--host", host])
        assert code == 2
        assert "this machine" in err
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema": "halstack.host/0"}')
    for command in ("devices", "doctor"):
        code, _, err = hal([command, "--host", bad])
        assert code == 2
        assert "halstack.host/0" in err
        assert str(bad) in err


ASKING = """
from hal.device import DetectedDevice
from hal.hookspecs import BackendInfo, hookimpl

@hookimpl
def hal_backend_info():
    return BackendInfo(name={name!r}, vendor="Acme", api_range=">=1")

@hookimpl
def hal_detect_devices(host):
    {body}
    return []
"""


def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> Site:
    site = Site(tmp_path / "site")
    site.folder.mkdir()
    monkeypatch.syspath_prepend(str(site.folder))
    for name, body in bodies.items():
        site.add(name, ASKING.format(name=name, body=body))
    return site


def test_what_plugins_ask_in_their_processes_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = uuid.uuid4().hex
    (tmp_path / "acme").write_text(secret)
    big = tmp_path / "big"
    big.write_bytes(b"x" * (9 << 20))
    site = _site(
        tmp_path,
        monkeypatch,
        alpha=f"host.read_text({str(tmp_path / 'acme')!r}); host.run_command(['echo', 'hi'], 9)",
        beta="host.environ('ACME_BETA'); host.has_module('pluggy'); host.exists('/dev/null')",
        crash="import os; os._exit(3)",
        greedy=f"host.read_text({str(big)!r}); host.read_text({str(tmp_path)!r} + '/../' + "
        f"{tmp_path.name!r} + '/big'); host.package_file('x', 'y')",
        huge=f"host.run_command(['cat', {str(big)!r}], 9)",
    )
    monkeypatch.setenv("ACME_BETA", "on")
    copy = tmp_path / "copy"
    copy.write_bytes(b"y" * (9 << 20))
    body = f"[host.read_text(path) for path in {[str(big), str(copy)]!r}]"
    site.add("more", ASKING.format(name="more", body=body))
    recorder = RecordingHost(LocalHost())
    survey = survey_plugins(recorder, entries=site.entries())
    recorded = recorder.recorded()
    assert recorded.read_text(str(tmp_path / "acme")) == secret
    assert recorded.run_command(["echo", "hi"], 1) == CommandOutput(0, "hi\n", "")
    assert recorded.environ("ACME_BETA") == "on"
    assert recorded.has_module("pluggy")
    assert recorded.exists("/dev/null")
    assert {state.entry.name for state in survey.states if state.status.is_trouble} == {
        "crash",
        "huge",
    }
    gaps = sorted(re.findall(r"plug-in '(\w+)'", " ".join(recorder.gaps)))
    assert gaps == ["crash", "more"]


def test_a_recording_is_written_also_when_detection_fails(
    hal: Hal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (
        "host.environ('ACME_WHY')\n    return [DetectedDevice(device_id='acme:0', vendor='a', "
        "name='n', arch='a')]"
    )
    _site(tmp_path, monkeypatch, alpha=found, beta=found)  # two claims on one device
    monkeypatch.setenv("ACME_WHY", "because")
    file = tmp_path / "failed.json"
    code, _, err = hal(["devices", "--record", file])
    assert code == 2
    assert "acme:0" in err
    assert load_recorded_host(file).environ("ACME_WHY") == "because"
    code, _, err = hal(["devices", "--record", tmp_path / "no" / "x.json"])
    assert code == 2


def test_usual_questions_on_any_host() -> None:
    for name in HOSTS:
        recorder = RecordingHost(load_recorded_host(FOLDER / f"{name}.json"))
        ask_usual_questions(recorder)
        recorded = recorder.recorded()
        assert detect_topology(recorded) == detect_topology(recorder.inner)
