"""Errors and warnings of an audited program say what they say without an audit."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hal
from hal.auditing import own_frames

OURS = str(Path(own_frames.__file__).parent)
HERE = Path(__file__).name


class Wrong(torch.nn.Module):
    """Fails in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(torch.ones(1, 4))
        return torch.relu(self.layer(x))


WRONG = Wrong()


def _product() -> None:
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def _method() -> None:
    torch.ones(2, 3).view(7)


def _python_function() -> None:
    F.cross_entropy(torch.ones(2, 3), torch.tensor([5, 1]))


def _module() -> None:
    WRONG(torch.ones(1, 5))


def _inference() -> None:
    with torch.inference_mode():
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))


def _backward() -> None:
    torch.ones(2, requires_grad=True).backward()


def _extension() -> None:
    @torch.library.custom_op("hal_test_frames::wrong", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise LookupError("in the program's own op")

    wrong(torch.ones(2))


PROGRAMS = [_product, _method, _python_function, _module, _inference, _backward, _extension]


def _entries(program: Callable[[], Any]) -> tuple[str, list[tuple[str, int | None, str]]]:
    try:
        program()
    except Exception as error:  # noqa: BLE001  # whatever it is, its traceback is asked for
        found = traceback.extract_tb(error.__traceback__)
        return str(error), [(entry.filename, entry.lineno, entry.name) for entry in found]
    raise AssertionError("the program did not fail")


def _unlike_a_mode(
    entries: list[tuple[str, int | None, str]],
) -> list[tuple[str, int | None, str]]:
    """Without what torch itself adds for any mode: a function of its own in Python hands over."""
    found: list[tuple[str, int | None, str]] = []
    for entry in entries:
        if entry[2] == "handle_torch_function":
            found.pop()
        else:
            found.append(entry)
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_tracebacks_are_those_of_a_run_without(program: Callable[[], Any]) -> None:
    text, expected = _entries(program)
    with hal.audit() as report:
        found_text, found = _entries(program)
        again = _entries(program)[1]
    assert found_text == text
    assert _unlike_a_mode(found) == _unlike_a_mode(again) == expected
    assert report.trace.swallowed


def _complex_to_real() -> None:
    torch.ones(2, dtype=torch.complex64).to(torch.float32)


def _again() -> None:
    torch.ones(3, dtype=torch.complex64).to(torch.float32)


def _softmax_without_dim() -> None:
    F.softmax(torch.ones(2, 3))


def _shown(programs: list[Callable[[], Any]], action: Any) -> list[tuple[str, str, int]]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        torch.set_warn_always(True)
        try:
            for program in programs:
                program()
        finally:
            torch.set_warn_always(False)
    return [(str(one.message), one.filename, one.lineno) for one in shown]


WARNING = [_complex_to_real, _again, _complex_to_real, _softmax_without_dim, _softmax_without_dim]


@pytest.mark.parametrize("action", ["default", "always", "once", "module", "ignore"])
def test_warnings_are_those_of_a_run_without(action: str) -> None:
    globals().pop("__warningregistry__", None)
    expected = _shown(WARNING, action)
    globals().pop("__warningregistry__", None)
    with hal.audit() as report:
        found = _shown(WARNING, action)
    assert found == expected
    assert bool(expected) == (action != "ignore")
    places = {str(message.location) for message in report.trace.messages}
    assert not [place for place in places if OURS in place or "torch_modes" in place]


def test_a_warning_that_is_an_error_is_raised_where_it_was() -> None:
    def program() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.set_warn_always(True)
            try:
                _complex_to_real()
            finally:
                torch.set_warn_always(False)

    text, expected = _entries(program)
    with hal.audit():
        assert _entries(program) == (text, expected)


def test_a_filter_for_a_module_is_obeyed() -> None:
    def run() -> list[str]:
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
            torch.set_warn_always(True)
            try:
                _complex_to_real()
            finally:
                torch.set_warn_always(False)
        return [str(one.message) for one in shown]

    assert run() == []
    with hal.audit():
        assert run() == []
