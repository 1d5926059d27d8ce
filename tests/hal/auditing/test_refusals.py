"""A refusal that somebody swallows is in the report all the same, and fails the gate."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from audit_reports import report
from hal.auditing.document import Refusal
from hal.auditing.gate import exit_code
from hal.auditing.gates import GateClass
from hal.auditing.refusals import mark_refusals, refusal_findings, refusals_since
from hal.auditing.surroundings import complete_report
from hal.cli import main
from hal.errors import DocumentError, HalError, PlanError, UserError, WaiverError
from hal.refusal_log import MAX_KEPT, REFUSALS, RefusalLog
from hal.waivers import load_waivers


@pytest.fixture
def mark() -> int:
    gc.collect()
    return mark_refusals()


def refuse(path: str = "/nowhere/waivers.toml") -> None:
    """halstack refuses: there is no such file."""
    load_waivers(path)


def swallowed(mark: int) -> list[Refusal]:
    gc.collect()
    return [refusal for refusal in refusals_since(mark) if refusal.is_swallowed]


def program_that_swaps_a_component() -> str:
    try:
        refuse()
    except Exception:  # noqa: BLE001 - the program that the test is about
        return "the slow one"
    return "the fast one"


def test_an_outer_except_that_swaps_a_component_fails_the_gate(mark: int) -> None:
    assert program_that_swaps_a_component() == "the slow one"
    (refusal,) = swallowed(mark)
    assert refusal.who == "waiver file /nowhere/waivers.toml"
    assert refusal.required == "a readable text file"
    assert refusal.location is not None
    assert refusal.location.function == "program_that_swaps_a_component"
    assert refusal.location.file.endswith("test_refusals.py")
    audited = complete_report(report(), environment={}, refusals=refusals_since(mark))
    assert audited.refusals == (refusal,)
    (found,) = audited.findings
    assert (found.rule, found.gate) == ("swallowed-refusal", GateClass.LOST_FAST_PATH)
    assert exit_code(audited, {GateClass.LOST_FAST_PATH}) == 1
    assert complete_report(audited, environment={}, refusals=audited.refusals) == audited


def test_one_that_is_kept_is_seen_as_well(mark: int) -> None:
    kept = []
    try:
        refuse()
    except HalError as error:
        kept.append(error)
    assert len(swallowed(mark)) == 1
    kept.clear()
    assert len(swallowed(mark)) == 1


def test_suppress_and_threads_and_executors(mark: int) -> None:
    with contextlib.suppress(WaiverError):
        refuse("/nowhere/1")

    def work(path: str) -> None:
        refuse(path)

    with concurrent.futures.ThreadPoolExecutor() as executor:
        executor.submit(work, "/nowhere/2")  # nobody asks for the result
        done = executor.submit(work, "/nowhere/3")
        with contextlib.suppress(WaiverError):
            done.result()
    del done

    def in_thread() -> None:
        with contextlib.suppress(WaiverError):
            work("/nowhere/4")

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert sorted(r.who[-1] for r in swallowed(mark)) == ["1", "2", "3", "4"]


def test_what_halstack_handles_itself_is_not_swallowed(
    mark: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["diff", "/nowhere/a.json", "/nowhere/b.json"])
    assert raised.value.code == 2
    assert "DocumentError" in capsys.readouterr().err
    gc.collect()
    (refusal,) = refusals_since(mark)
    assert refusal.who == "file /nowhere/a.json"
    assert not refusal.is_swallowed
    assert refusal_findings([refusal]) == []


def test_what_ends_the_program_is_not_swallowed(mark: int) -> None:
    def program() -> None:
        try:
            refuse("/nowhere/first")
        except WaiverError as error:
            raise RuntimeError("the program's own way to say it") from error

    try:
        program()
    except RuntimeError as ending:
        found = refusals_since(mark, ending=ending)
    assert [(r.who, r.is_swallowed) for r in found] == [("waiver file /nowhere/first", False)]


def test_errors_that_nobody_raised_or_that_are_not_ours(mark: int) -> None:
    PlanError("a", "b", "c", "d")
    with contextlib.suppress(PlanError):
        raise PlanError("the program's own", "b", "c", "d")
    gc.collect()
    assert refusals_since(mark) == ()


def test_equal_refusals_are_one_and_many_are_bounded(mark: int) -> None:
    for _ in range(50):
        program_that_swaps_a_component()
    assert len(swallowed(mark)) == 1
    log = RefusalLog()
    for number in range(MAX_KEPT + 40):
        try:
            refuse(f"/nowhere/{number}")
        except WaiverError as error:
            log.note_end(error, number + 1)
    assert len(log.refusals()) == MAX_KEPT
    assert log.num_dropped == 40
    log.clear()
    assert log.refusals() == []


def test_no_error_and_no_frame_is_kept_alive(mark: int) -> None:
    class Large:
        """Stands for the tensors of a frame."""

    watched = []

    def program() -> None:
        large = Large()
        watched.append(weakref.ref(large))
        try:
            refuse()
        except WaiverError as error:
            watched.append(weakref.ref(error))

    program()
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    assert len(swallowed(mark)) == 1


def test_threads_lose_none(mark: int) -> None:
    def work(number: int) -> None:
        for step in range(20):
            with contextlib.suppress(WaiverError):
                refuse(f"/nowhere/{number}/{step % 4}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    found = [r for r in REFUSALS.refusals(since=mark) if r.is_swallowed]
    assert len(found) == 8 * 4
    assert sum(refusal.count for refusal in found) == 8 * 20


def test_errors_stay_what_they_were() -> None:
    error = DocumentError("a", "b", "c", "d")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is DocumentError
        assert str(other) == str(error)
        assert other.refusal_number != error.refusal_number

    class FileError(UserError, OSError):
        """A plug-in's own, of two parents."""

    assert FileError(2, "no such thing").errno == 2


def test_a_forked_child_starts_anew(mark: int) -> None:
    program_that_swaps_a_component()
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(len(refusals_since(0)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(swallowed(mark)) == 1


def test_an_exit_with_errors_alive_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from hal.waivers import load_waivers\n"
        "kept = []\n"
        "try:\n"
        "    load_waivers('/nowhere')\n"
        "except Exception as error:\n"
        "    kept.append((error, kept))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
