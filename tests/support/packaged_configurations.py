"""Configurations that the package has: by the model, for the models and devices named below.

`python tests/support/packaged_configurations.py FOLDER [DEVICE …]` ranks them with the classes of
each model's plan, those between the ends of a range of tokens included, and writes
kernels/hal_kernels/configurations. FOLDER keeps every trial, so that a second call compiles only
what changed; the package gets the default and the best of each class.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from absent_plans import plan, profile
from hal.answers import kernel_uses_of
from hal.ops.request import TokenRange
from hal_kernels.aot.targets import Target, find_target
from hal_kernels.tuning.configuration_files import ConfigurationFile, ShapeEntry, Trial
from hal_kernels.tuning.session import TuningSession, TuningTask, make_task
from hal_kernels.tuning.shapes import ShapeClass, parse_shape
from hal_kernels.tuning.store import (
    PACKAGED,
    code_hash,
    configuration_path,
    load_configurations,
    triton_version,
)
from hal_kernels.tuning.trial_compiling import compile_trial
from hal_kernels.tuning.tunable_kernels import TUNABLE

LLAMA_8B = Path(__file__).with_name("llama_8b_like")
LARGE = ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5")
SMALL = ("qwen3-30b-a3b", str(LLAMA_8B))
GROUPS: Mapping[str, int] = {
    "rtx-pro-6000-blackwell-server": 8,
    "rtx-pro-6000-blackwell-ws": 8,
    "rtx-4090": 8,
    "h200-sxm": 8,
    "h100-sxm": 8,
    "mi300x": 8,
    "radeon-pro-w7900": 1,
}
"""Device -> how many of them serve a large model."""
_SIZES = tuple(1 << power for power in range(14))


def classes(device: str) -> Iterator[tuple[str, str]]:
    """(kernel, class) of every planned call, at the ends of its tokens and each power of two
    between, with and without verified peer access."""
    found: dict[tuple[str, str], None] = {}
    for links in ({}, {"p2p": "verified"}):
        spec = profile(device, **links)
        for model in (*LARGE, *SMALL):
            tp = GROUPS[device] if model in LARGE else 1
            for op in plan(model, spec, tp).ops:
                low, high = op.tokens.low, op.tokens.high
                for tokens in {low, high, *(s for s in _SIZES if low < s < high)}:
                    request = op.site.request.with_tokens(TokenRange(tokens, tokens))
                    for use in kernel_uses_of(op.choice, request):
                        if use.shape:
                            found[use.kernel, use.shape] = None
    yield from sorted(found)


class SharedCompiler:
    """Compiles what no device of the architecture had: one line of JSON a trial in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, dict[str, Trial]] = {}

    def __call__(
        self, kernel: str, target: Target, shape: ShapeClass, configuration: Mapping[str, int]
    ) -> Trial:
        default = TUNABLE[kernel].default(target, shape).config
        name = f"{kernel}-{target.arch}-{code_hash(kernel)}-{triton_version()}.jsonl"
        path = self._folder / "compiled" / name
        key = json.dumps([shape.dtype, default, dict(configuration)], sort_keys=True)
        known = self._known.setdefault(path, self._read(path))
        if key not in known:
            known[key] = compile_trial(kernel, target, shape, configuration)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([key, known[key].model_dump()]) + "\n")
        return known[key]

    def _read(self, path: Path) -> dict[str, Trial]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {key: Trial(**trial) for key, trial in map(json.loads, lines)}


def rank(device: str, folder: Path) -> None:
    """Ranks every class of a device, and packages what was found."""
    spec, store = profile(device), folder / "store"
    target = find_target(spec.arch)
    tasks = []
    for kernel, text in classes(device):
        tunable = TUNABLE[kernel]
        shape = parse_shape(
            text, size_names=tunable.size_names, forms=tunable.forms, dtypes=tunable.dtypes(target)
        )
        tasks.append(make_task(tunable, shape, target, spec, basis="modelled"))
    print(f"{device}: {len(tasks)} classes", flush=True)
    TuningSession(store, compile=SharedCompiler(folder)).run(tasks, _told)
    package(device, tasks, store)


def _told(task: TuningTask, entry: ShapeEntry, total: int) -> None:
    best = entry.best()
    if entry.is_complete and best is not None:
        same = "default" if best is entry.trials[0] else str(best.configuration)
        print(
            f"  {task.tunable.kernel} {task.shape}: {len(entry.trials)} of {total}: {same}",
            flush=True,
        )


def package(device: str, tasks: list[TuningTask], store: Path) -> None:
    """The default and the best of each class, in the package's folder of the device."""
    written = set()
    for kernel in sorted({task.tunable.kernel for task in tasks}):
        wanted = {str(task.shape) for task in tasks if task.tunable.kernel == kernel}
        found = load_configurations(configuration_path(store, device, kernel))
        assert found is not None
        entries = [
            _trimmed(e)
            for e in sorted(found.entries, key=lambda e: e.shape)
            if e.shape in wanted and e.best() is not None
        ]
        path = configuration_path(PACKAGED, device, kernel)
        whole = ConfigurationFile(device=device, arch=found.arch, kernel=kernel, entries=entries)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(a_line_an_entry(whole), encoding="utf-8")
        written.add(path)
    for path in set((PACKAGED / device).glob("*.json")) - written:
        path.unlink()


def a_line_an_entry(document: ConfigurationFile) -> str:
    """As JSON that shows a changed class as a changed line; what is as ever is left out."""
    head = json.dumps(document.model_dump(by_alias=True, exclude={"entries"}), sort_keys=True)
    lines = ",\n".join(
        "  " + json.dumps(entry.model_dump(exclude_defaults=True), sort_keys=True)
        for entry in document.entries
    )
    return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n'


def _trimmed(entry: ShapeEntry) -> ShapeEntry:
    """The default, and the fastest of the best one's tier: what may have been lost stays known."""
    best = entry.best()
    assert best is not None
    same = [t for t in entry.trials if t.us is not None and t.tier == best.tier]
    fastest = min(same, key=lambda t: t.us or 0.0)
    kept = [t for i, t in enumerate(entry.trials) if i == 0 or t is fastest]
    return entry.model_copy(update={"trials": kept})


def main() -> int:
    folder = Path(sys.argv[1])
    for device in sys.argv[2:] or GROUPS:
        rank(device, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
