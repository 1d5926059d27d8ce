"""Steps under torch's profiler: what the dispatch mode cannot see, because it is of one thread.

An implementation that hands work to a thread of its own, or calls operators from C++ on another
one, passes the mode; the profiler records every thread's.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import torch

from hal.auditing.document import Evidence, Finding
from hal.auditing.gates import GateClass, Severity
from hal.dispatch_spy import is_tracked
from hal_engine.api import GenerationRequest
from hal_engine.engine_core import EngineCore


def profiled_products(core: EngineCore, request: GenerationRequest) -> Counter[str]:
    """Matrix products and the like that the profiler saw while one request ran, on any thread."""
    # Its library tells standard error of its start and end, unless it is told not to before.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    core.submit(request, None, time.monotonic())
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        while core.has_work:
            core.step()
    found: Counter[str] = Counter()
    for event in profile.key_averages():
        name = str(event.key)
        if is_tracked(name):
            found[name] += event.count
    return found


def unseen_findings(profiled: Counter[str], seen: frozenset[str]) -> list[Finding]:
    """Operators that only the profiler saw. seen: what passed the dispatch mode, composites too."""
    return [
        Finding(
            rule="unrouted",
            gate=GateClass.UNROUTED,
            severity=Severity.ERROR,
            title=f"{name} runs where the thread that steps does not see it",
            op=name,
            evidence=(
                Evidence(
                    what="calls that only torch's profiler saw",
                    required="0",
                    found=f"{calls} while one request ran",
                ),
            ),
            remedy="find the implementation that starts threads, and have it run in its caller's",
            calls=calls,
        )
        for name, calls in sorted(profiled.items())
        if name not in seen
    ]
