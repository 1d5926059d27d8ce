"""All benchmarks, or a quick form of them: what `make bench` runs.

  python benchmarks/run_all.py --quick          routing overhead, kernels, our engine alone
  python benchmarks/run_all.py                  the same with more repeats
  python benchmarks/run_all.py --quick --peers  also other engines and servers beside ours; first
                                                `python benchmarks/peers.py --setup all`

Each part is a script of its own with its own `--help`; this one only runs them one after the other,
since two at once would measure each other. A part that fails is named at the end and makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from contenders.catalogue import OWN
from contenders.machine import load_average

BENCHMARKS = Path(__file__).resolve().parent
MODEL = BENCHMARKS.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BUSY_LOAD = 0.5


def parts(*, quick: bool, with_peers: bool) -> list[list[str]]:
    """The scripts with their arguments, in order."""
    routing = ["routing_overhead.py"]
    routing += ["--repeats", "11", "--number", "5000"] if quick else []
    if MODEL.exists():
        routing += ["--model", str(MODEL)]
    found = [routing]
    for name, few in (
        ("cpu_gemm.py", ["--budget-ms", "40", "--max-copies", "30", "--threads", "2"]),
        ("cpu_kernels.py", ["--repeats", "3", "--threads", "2"]),
        ("engine_overhead.py", ["--steps", "100"]),
    ):
        if (BENCHMARKS / name).exists():
            found.append([name, *(few if quick else [])])
    rounds = ["--rounds", "1" if quick else "3"]
    alone = [] if with_peers else ["--only", OWN, "--no-check"]
    found.append(["peers.py", *rounds, *alone])
    if with_peers:
        found.append(["http_load.py", "--rounds", "1" if quick else "2"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, one round")
    parser.add_argument("--peers", action="store_true", help="also other engines and servers")
    chosen = parser.parse_args()
    if load_average() > BUSY_LOAD:
        print(f"the machine is busy (load {load_average():.1f}): expect slow and noisy numbers")
    failed: list[str] = []
    for name, *arguments in parts(quick=chosen.quick, with_peers=chosen.peers):
        print(f"\n=== {time.strftime('%H:%M:%S')} {name} {' '.join(arguments)}", flush=True)
        command = [sys.executable, str(BENCHMARKS / name), *arguments]
        # Each script sets its own threads; what this shell set would be a hidden variable.
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
