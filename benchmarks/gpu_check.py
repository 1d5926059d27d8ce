"""The Triton kernels on a GPU: builds them, checks their numbers, times them beside torch's.

    python benchmarks/gpu_check.py [--seconds 240] [--only TEXT] [--json FILE] [--seed N]
    python benchmarks/gpu_check.py --dry-run      on a CPU, interpreted, tiny, nothing timed
    python benchmarks/gpu_check.py --list         the cases and the kernels each launches

Each case compares our kernel with a float64 result on the same device, and says which kernels it
launched, as seen where Triton launches them. Then it is timed, in turns with torch's own op where
there is one (the ratio is theirs / ours: above 1 ours is faster), and set beside the least time
that this device needs for the work by its own copies and products. A case has its share of the
time that is left; none begins after --seconds, and half a minute later the run ends wherever it
is. Results are written after every case. Exit code: 1 if anything is wrong or failed, 3 if the
time ended before all cases had run.

Needs torch, triton, pluggy and pydantic, no installation (it finds the packages of this checkout).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_cases.case import CaseMaker
    from gpu_cases.running import Outcome

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / name) for name in ("hal", "kernels", "benchmarks")]
_NEEDED = ("torch", "triton", "pluggy", "pydantic")
_GRACE_S = 30.0  # after --seconds, for a case that does not return

if "--dry-run" in sys.argv:  # before a kernel is defined
    sys.path.append(str(ROOT / "tests" / "support"))
    import faithful_interpreter

    faithful_interpreter.install()


def _can_be_written(path: Path) -> bool:
    """Before minutes of work: results are kept after each case."""
    if path.is_dir():
        return False
    return os.access(path if path.exists() else path.parent, os.W_OK)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins after (240)")
    parser.add_argument("--only", default="", help="cases or kernels whose name has this text")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--seed", type=int, help="of each case's random inputs (another each run)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, interpreted")
    parser.add_argument("--list", action="store_true", help="what there is, and run nothing")
    options = parser.parse_args(arguments)
    if options.json is not None and not _can_be_written(options.json):
        parser.error(f"--json: required a file that can be written, found {options.json}")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(
            f"required {', '.join(_NEEDED)}, found no {', '.join(missing)}; install them, or put "
            "their unpacked wheels on PYTHONPATH"
        )
    import torch

    if not (options.dry_run or options.list or torch.cuda.is_available()):
        parser.error("required a GPU that torch sees, found none; --dry-run needs none")
    return options


def main() -> int:
    options, begin = options_of(), time.monotonic()
    import torch
    from gpu_cases.case import Bench
    from gpu_cases.catalogue import all_makers
    from gpu_cases.report import document, line, write
    from gpu_cases.running import allowance, run_maker
    from gpu_cases.timing import measured_rates

    makers = tuple(
        maker
        for maker in all_makers()
        if any(options.only in name for name in (maker.name, *maker.kernels))
    )
    if not makers:
        print(
            f"gpu_check.py: --only: required a part of a case's or a kernel's name (--list shows "
            f"them), found {options.only!r}",
            file=sys.stderr,
        )
        return 2
    if options.list:
        for maker in makers:
            print(f"{maker.name}: {', '.join(maker.kernels)}")
        return 0
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    bench = Bench(options.dry_run)
    rates = None if options.dry_run else measured_rates()
    outcomes: list[Outcome] = []

    def keep() -> None:
        if options.json:
            names = [maker.name for maker in makers[len(outcomes) :]]
            took_s = time.monotonic() - begin
            what = document(bench, rates, list(outcomes), not_run=names, took_s=took_s, seed=seed)
            write(options.json, what)

    if not options.dry_run:
        end_after(options.seconds + _GRACE_S - (time.monotonic() - begin))
    for number, maker in enumerate(makers):
        left_s = options.seconds - (time.monotonic() - begin)
        if left_s <= 0.0:
            break
        allowed_s = allowance(makers, number, left_s)
        torch.manual_seed(seed)  # of each case, so that --only repeats it
        outcomes.append(run_maker(maker, bench, allowed_s=allowed_s, rates=rates))
        print(line(outcomes[-1]), flush=True)
        keep()
    keep()
    return verdict(outcomes, makers[len(outcomes) :], time.monotonic() - begin)


def verdict(outcomes: Sequence[Outcome], not_run: Sequence[CaseMaker], took_s: float) -> int:
    """The exit code, and what is said at the end."""
    wrong = [one for one in outcomes if one.failure or not one.is_right]
    missed = [one for one in outcomes if one.goal == "missed"]
    for maker in not_run:
        print(f"out of time, not run: {maker.name}")
    print(
        f"{len(outcomes) - len(wrong)} right, {len(wrong)} wrong, {len(not_run)} not run, "
        f"{len(missed)} slower than the goal, {took_s:.0f} s"
    )
    return 1 if wrong else 3 if not_run else 0


def end_after(seconds: float) -> None:
    """Ends the process even while a kernel does not return: what was written by then is kept."""

    def end() -> None:
        print("out of time: a case did not end", flush=True)
        os._exit(3)

    timer = threading.Timer(max(seconds, 1.0), end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
