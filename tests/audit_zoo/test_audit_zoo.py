"""The zoo: small programs that each lose a fast path in one known way, and others that lose none.

Each runs unchanged under a real audit. A losing program says in comments what has to be found and
where: `# LOSES: rule, rule` speaks of its line, or of the next one if it stands alone, and
`# LOSES-ANYWHERE: rule` of a finding without a line. Nothing else that a gate could fail on may be
found, and nothing at all in a clean program.

Torch starts once for many programs. `# RUN: compiled` asks for the process of those that compile,
`# RUN: command NAME=VALUE…` for one of `hal audit run` with further variables.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hal.auditing.foreign_variables import known_variable

ZOO = Path(__file__).parent
LOSING = sorted(path.relative_to(ZOO).as_posix() for path in ZOO.glob("losing/*.py"))
CLEAN = sorted(path.relative_to(ZOO).as_posix() for path in ZOO.glob("clean/*.py"))
TIMEOUT_S = 600
# Torch starts in several processes, which takes its time on a machine that has other work.
pytestmark = pytest.mark.timeout(1800)
_COMMAND = (
    "import sys; from hal.cli.audit_run import run_program; sys.exit(run_program(sys.argv[1:]))"
)

_RUN = re.compile(r"^# RUN: (?P<how>\w+) ?(?P<rest>.*)$", re.MULTILINE)
_LOSES = re.compile(r"# LOSES: (?P<rules>[\w, -]+)$")
_ANYWHERE = re.compile(r"^# LOSES-ANYWHERE: (?P<rules>[\w, -]+)$", re.MULTILINE)

Expected = set[tuple[str, int | None]]


def expected_of(program: str) -> Expected:
    """(rule, line) of everything that a program says it loses."""
    text = (ZOO / program).read_text(encoding="utf-8")
    found: Expected = set()
    for number, line in enumerate(text.splitlines(), 1):
        match = _LOSES.search(line)
        if match:
            stands_alone = line.strip().startswith("#")
            found |= {(rule.strip(), number + stands_alone) for rule in match["rules"].split(",")}
    for match in _ANYWHERE.finditer(text):
        found |= {(rule.strip(), None) for rule in match["rules"].split(",")}
    return found


def found_in(report: dict[str, Any], program: str) -> Expected:
    """(rule, line) of what a gate can fail on; no line if it is not one of the program."""
    found: Expected = set()
    for finding in report["findings"]:
        if finding["gate"] == "advice":
            continue
        place = finding["location"]
        is_ours = place is not None and place["file"].endswith(program)
        found.add((finding["rule"], place["line"] if is_ours else None))
    return found


@dataclass(frozen=True)
class Job:
    """A process: programs that it runs, further variables, whether by `hal audit run`."""

    programs: tuple[str, ...]
    further: dict[str, str] = field(default_factory=dict)
    is_command: bool = False


def _jobs() -> list[Job]:
    """Long ones first. The programs that share a process are in two halves, for two cores."""
    together: list[str] = []
    compiling: list[str] = []
    own: list[Job] = []
    for program in (*LOSING, *CLEAN):
        match = _RUN.search((ZOO / program).read_text(encoding="utf-8"))
        if match is None:
            together.append(program)
        elif match["how"] == "compiled":
            compiling.append(program)
        else:
            pairs = dict(pair.split("=", 1) for pair in match["rest"].split())
            own.append(Job((program,), pairs, is_command=True))
    halves = (Job(tuple(together[::2])), Job(tuple(together[1::2])))
    return [Job(tuple(compiling)), *halves, *own]


def _environment(further: dict[str, str]) -> dict[str, str]:
    """Ours without the variables that are findings of their own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if known_variable(name) is None or name == "OMP_NUM_THREADS"
    }
    return {**kept, **further}


def _run(folder: Path, number: int, job: Job) -> dict[str, Any]:
    target = folder / f"{number}.json"
    command = [sys.executable, "zoo_process.py", str(target), *job.programs]
    if job.is_command:
        command = [sys.executable, "-c", _COMMAND, "--json", str(target), *job.programs]
    done = subprocess.run(
        command,
        cwd=ZOO,
        env=_environment(job.further),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return {program: {"error": done.stderr[-3000:]} for program in job.programs}
    reports: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return {job.programs[0]: reports} if job.is_command else reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Reports of all programs."""
    folder = tmp_path_factory.mktemp("zoo")
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(_run, folder, number, job) for number, job in enumerate(_jobs())]
        return {program: report for job in jobs for program, report in job.result().items()}


@pytest.mark.parametrize("program", LOSING)
def test_what_a_program_loses_is_found_named_and_placed(
    program: str, reports: dict[str, Any]
) -> None:
    expected = expected_of(program)
    assert expected, "a losing program without a marker"
    assert "error" not in reports[program], reports[program]["error"]
    assert found_in(reports[program], program) == expected


@pytest.mark.parametrize("program", CLEAN)
def test_nothing_is_found_in_a_clean_program(program: str, reports: dict[str, Any]) -> None:
    assert "error" not in reports[program], reports[program]["error"]
    found = [(f["rule"], f["gate"], f["title"]) for f in reports[program]["findings"]]
    assert found == []


def test_findings_are_whole(reports: dict[str, Any]) -> None:
    """Each says what was required and found, what to change, and its share of the time."""
    for program in LOSING:
        for finding in reports[program].get("findings", []):
            assert finding["evidence"], (program, finding["rule"])
            assert finding["remedy"], (program, finding["rule"])
            assert finding["title"]
            share = finding["time_share"]
            assert share is None or 0.0 <= share <= 1.0


def test_the_zoo_is_as_large_as_promised() -> None:
    assert len(LOSING) >= 25
    assert len(CLEAN) >= 25
    rules = {rule for program in LOSING for rule, _ in expected_of(program)}
    assert len(rules) >= 25, sorted(rules)
