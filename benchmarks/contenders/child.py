"""One engine in one process: `python -m contenders.child NAME --models FOLDER --threads N ...`.

Reads one JSON object a line from standard input and answers with one a line on what was standard
output; whatever the engine's library prints goes to standard error. An exception ends the process:
its traceback is in the log that the parent keeps.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from contenders.catalogue import ENTRIES
from contenders.protocol import Contender, LoadOptions

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entry", choices=sorted(ENTRIES))
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    chosen = parser.parse_args()
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    entry = ENTRIES[chosen.entry]
    contender: Contender = getattr(importlib.import_module(entry.module), entry.factory)()
    options = LoadOptions(
        models=chosen.models,
        precision=entry.precision,
        threads=chosen.threads,
        max_sequences=chosen.max_sequences,
        max_length=chosen.max_length,
    )
    for line in sys.stdin:
        command = json.loads(line)
        replies.write(json.dumps(_answer(contender, options, command)) + "\n")
        if command["do"] == "close":
            break
    replies.flush()
    # Some libraries hang or crash while their threads are torn down; nothing is left to do.
    os._exit(0)


def _end_with_parent() -> None:
    """A parent that is killed must not leave a stopped process behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(contender: Contender, options: LoadOptions, command: dict[str, Any]) -> dict[str, Any]:
    what = command["do"]
    started = time.perf_counter()
    if what == "load":
        contender.load(options)
        return {"seconds": time.perf_counter() - started, "versions": contender.versions()}
    if what == "generate":
        tokens = contender.generate(command["prompts"], command["new_tokens"])
        return {"seconds": time.perf_counter() - started, "tokens": tokens}
    if what == "score":
        return {"nats": contender.score(command["prompt"], command["continuation"])}  # type: ignore[attr-defined]
    if what == "close":
        contender.close()
        return {}
    raise ValueError(f"child: required load, generate, score or close, found {what!r}")


if __name__ == "__main__":
    sys.exit(main())
