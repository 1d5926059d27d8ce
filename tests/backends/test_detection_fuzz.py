"""Damaged hosts: whatever is read, detection answers, or refuses with an error of its own."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerator_plugins import BACKENDS, look_at
from hal.errors import HalError, PluginError
from hal.host import RecordedHost
from host_catalogue import CATALOGUE, FOLDER

_DOCUMENTS = {name: (FOLDER / f"{name}.json").read_text() for name in sorted(CATALOGUE)}
# What sysfs, tools and people really put into the place of a value, and what nobody does.
_TEXTS = st.one_of(
    st.sampled_from(
        [
            *("", "\n", "0", "-1", "0x10de\n", "0x9999\n", "0xffff\n", "0x1d94", "Unknown", "N/A"),
            *(
                "[N/A]",
                "255",
                "1e999",
                "32.0 GT/s PCIe",
                "2.5 GT/s",
                "99999999999999999999",
                "\x00",
            ),
            *("nan", "٣", "é", "{", "[]", '{"card0": null}', '{"device_list": 3}', "GPU-", "0,0"),
            *("0000:00:00.0", "No devices were found\n", "| 0 | 0000:01:00.0 | 1/2 MiB |"),
        ]
    ),
    st.text(max_size=60),
)


def _mutate(draw: st.DrawFn, document: dict[str, Any]) -> None:
    """One to eight changes of a recorded host."""
    for _ in range(draw(st.integers(1, 8))):
        part = draw(
            st.sampled_from(
                ["files", "environment", "packages", "commands", "nodes", "links", "modules"]
            )
        )
        held = document[part]
        if isinstance(held, list):
            if held and draw(st.booleans()):
                held.pop(draw(st.integers(0, len(held) - 1)))
            elif part == "nodes":
                held.append(draw(st.sampled_from(_NODES)))
            continue
        keys = sorted(held) or ["CUDA_VISIBLE_DEVICES"]
        key = draw(st.sampled_from([k for k in keys if "/cpu" not in k] or keys))
        change = draw(st.integers(0, 3))
        if change == 0:
            held.pop(key, None)
        elif part == "commands":
            held[key] = _output(draw, held.get(key))
        elif part == "files" and change == 1:
            held[key] = None
        elif part == "links":
            held[key] = draw(st.sampled_from(sorted(held.values()) or ["/sys"]))
        else:
            held[key] = draw(_TEXTS)
    for name in draw(st.lists(st.sampled_from(_VARIABLES), max_size=2)):
        document["environment"][name] = draw(_TEXTS).replace("\x00", "")


_NODES = ["/dev/nvidiactl", "/dev/kfd", "/dev/biren", "/dev/tcaicard0", "/dev/mxcd", "/dev/xpuctrl"]
_VARIABLES = [
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "PPU_SDK", "LD_LIBRARY_PATH"),
]


def _output(draw: st.DrawFn, before: Any) -> Any:
    """A tool that hangs, fails, is cut short, or prints something else."""
    printed = str(before[1]) if isinstance(before, list) else ""
    return draw(
        st.one_of(
            st.none(),
            st.tuples(st.integers(-9, 255), _TEXTS, _TEXTS).map(list),
            st.integers(0, len(printed)).map(lambda end: [0, printed[:end], ""]),
            st.tuples(st.integers(0, len(printed)), _TEXTS).map(
                lambda pair: [0, printed[: pair[0]] + pair[1] + printed[pair[0] :], ""]
            ),
        )
    )


@st.composite
def damaged_hosts(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(sorted(_DOCUMENTS)))
    document = json.loads(_DOCUMENTS[name])
    _mutate(draw, document)
    return name, json.dumps(document)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(damaged_hosts())
def test_damaged_host_never_crashes_detection(damaged: tuple[str, str]) -> None:
    """A hook that lets anything but an error with who, required, found and remedy out would come
    back as the message of an exception with its place in the code."""
    _, text = damaged
    try:
        host = RecordedHost.from_json(text)
    except HalError:
        return  # a recording that is refused as a whole
    found = look_at(host, BACKENDS)
    for error in (*found.refused.values(), *found.undescribed.values()):
        assert isinstance(error, PluginError)
        assert "(at " not in error.found, error
        assert "required" in error.found, error
    for devices in found.devices.values():
        for device in devices:
            assert device.evidence
