"""`hal audit run [OPTIONS] [-m MODULE | SCRIPT] ARGS…`: any PyTorch program, audited unchanged.

The program's output stays its own: the report is printed on standard error, unless `-` asks for it
on standard output. The exit code is the program's; where that is 0, the gate's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.main import get_command

from hal.auditing.gate import (
    PROGRAM_FAIL_ON,
    AuditOutputs,
    finish_audit,
    parse_fail_on,
)
from hal.auditing.program_checks import check_program
from hal.auditing.program_runs import (
    Program,
    ProgramEnd,
    run_as_main,
    shadowed_modules,
)
from hal.cli import audit_options as gate
from hal.cli.option_groups import takes
from hal.errors import UsageError, UserError

if TYPE_CHECKING:
    from hal.auditing.gates import GateClass
    from hal.auditing.program import audit
    from hal.auditing.trace import Trace
    from hal.device import DeviceSpec

_NAME: Final = "hal audit run"
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `hal audit run` itself."""

    mode: Literal["full", "light"] = "full"
    outputs: AuditOutputs = field(default_factory=AuditOutputs)
    fail_on: frozenset[GateClass] = frozenset()
    waivers: Path | None = None


def run_program(words: Sequence[str], options: RunOptions | None = None) -> int:
    """Runs and audits the program that the words name; returns the exit code.

    options: those that stand before the program, if the caller has read them.

    Raises:
        UsageError: an unknown option, no program. DocumentError, WaiverError: of the outputs and
            the waivers, before the program begins.
    """
    own, program = split_words(words)
    if program is None or any(word in ("-h", "--help") for word in own):
        get_command(_options_app({})).main(args=["--help"], prog_name=_NAME, standalone_mode=False)
        if program is None and not {"-h", "--help"} & set(own):
            raise UsageError(_NAME, "a script, or -m and a module", "neither", "name a program")
        return 0
    found: dict[str, RunOptions] = {}
    if options is None:
        command = get_command(_options_app(found))
        command.main(args=list(own), prog_name=_NAME, standalone_mode=False)
        options = found["options"]
    check_program(program)
    _spare_program(program, options.outputs)
    return _run(program, options)


def _spare_program(program: Program, outputs: AuditOutputs) -> None:
    """Refuses to write a report over the program that it is of."""
    for kind, path in outputs.files().items():
        if program.path and path.exists() and os.path.samefile(path, program.path):
            raise UsageError(
                f"option --{kind}", "another file", f"{path}, the program", "name the file first"
            )


def split_words(words: Sequence[str]) -> tuple[list[str], Program | None]:
    """Our options, and the program with its own words, which may look like options of ours."""
    flags = _flags()
    position = 0
    while position < len(words):
        word = words[position]
        if word == "-m" and position + 1 < len(words):
            module, *rest = words[position + 1 :]
            return list(words[:position]), Program(module=module, words=tuple(rest))
        if word == "--" and position + 1 < len(words):
            path, *rest = words[position + 1 :]
            return list(words[:position]), Program(path=path, words=tuple(rest))
        if not word.startswith("-"):
            path, *rest = words[position:]
            return list(words[:position]), Program(path=path, words=tuple(rest))
        position += 1 if "=" in word or word in flags else 2
    return list(words), None


def _flags() -> frozenset[str]:
    return frozenset({"-h", "--help"})


def _options_app(found: dict[str, RunOptions]) -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.command(name="run", epilog="Then a script with its arguments, or -m MODULE with its own.")
    @takes(outputs=gate.read_outputs)
    def run(
        outputs: AuditOutputs,
        mode: Annotated[
            Literal["full", "light"],
            typer.Option(help="full sees every op and is slow; light observes some steps."),
        ] = "full",
        fail_on: gate.FailOn = None,
        waivers: gate.Waivers = None,
    ) -> None:
        """Run any PyTorch program unchanged, and report which fast paths it used and lost."""
        found["options"] = RunOptions(
            mode=mode,
            fail_on=parse_fail_on(fail_on, PROGRAM_FAIL_ON),
            waivers=waivers,
            outputs=outputs,
        )

    return app


def _run(program: Program, options: RunOptions) -> int:
    from hal.auditing.audit_waivers import read_audit_waivers
    from hal.auditing.children import at_process_end
    from hal.auditing.program import audit

    waivers = read_audit_waivers(options.waivers)
    restore_environment()
    observed = audit(mode=options.mode, subject=program.subject, waivers=waivers)
    observed.describe_device = _describe_device
    if names := shadowed_modules(program):
        observed.note(
            f"the program's own {', '.join(names)} beside it, if it imports that, is not what it "
            "got: a module of that name was there already; rename it"
        )
    folder, search_path = os.getcwd(), list(sys.path)
    observed.begin()
    codes: list[int] = []

    def finish(end: ProgramEnd) -> int:
        if not codes:
            with _search_path(search_path):
                codes.append(_finish(observed, options, end, folder))
        return codes[0]

    # A program that leaves by `os._exit` has its report as well.
    at_process_end(lambda: finish(ProgramEnd(exit_code=0)))
    end = run_as_main(program)
    if observed.is_fork:
        observed.end(end.error)
        _leave_fork(end.exit_code)
    return finish(end)


@contextlib.contextmanager
def _search_path(path: list[str]) -> Iterator[None]:
    """What the report imports is not the program's, whatever the files beside it are named."""
    of_program, sys.path[:] = list(sys.path), path
    try:
        yield
    finally:
        sys.path[:] = of_program


def _finish(observed: audit, options: RunOptions, end: ProgramEnd, folder: str) -> int:
    """The report, in the folder where the program began: it may have gone elsewhere."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    observed.end(end.error)
    report = observed.result
    sys.stdout.flush()
    stream: Any = sys.stdout if options.outputs.streamed else sys.stderr
    with contextlib.redirect_stdout(stream):
        return finish_audit(report, options.outputs, options.fail_on, end.exit_code)


def _leave_fork(code: int) -> None:
    """A fork that came back from the program ends here, as its parent's program would."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def restore_environment() -> None:
    """What `hal` sets for itself is not the program's."""
    from hal.cli.app import AUTOLOAD_IS_OURS

    if AUTOLOAD_IS_OURS:
        os.environ.pop(_AUTOLOAD, None)


def _describe_device(trace: Trace) -> DeviceSpec | None:
    """The device that did most, as its plug-in describes it, with its measured rates; None if no
    plug-in can: the program ran, and its report needs no plug-in."""
    from hal.cli.context import CliContext
    from hal.measurements import with_measurements

    times: dict[str, float] = {}
    for op in trace.ops:
        for fact in op.outputs[:1]:
            times[fact.device] = times.get(fact.device, 0.0) + op.time_us
    if not times:
        return None
    busiest = max(times, key=lambda device: times[device])
    try:
        backends = CliContext().backends
        for device in backends.devices:
            spec = backends.describe(device.device_id)
            if spec.torch_device.partition(":")[0] == busiest:
                return with_measurements(spec)
    except (UserError, ExceptionGroup) as error:
        typer.echo(f"note: the device is not described: {error}", err=True)
    return None
