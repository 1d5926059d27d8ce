"""Prometheus metrics: what the engine counts, and the latencies that clients see."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hal_engine.api import AsyncEngine, EngineDeadError
from hal_engine.server.latencies import RecentLatencies
from hal_engine.server.op_totals import OP_LABELS, op_totals

Outcome = Literal["ok", "client_error", "overload", "disconnected", "deadline", "error"]

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 3)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


def outcome_of(status: int | None) -> Outcome:
    """The label of `hal_requests_total` for a status: a response's, or a broken stream's."""
    if status is None:
        return "disconnected"
    if status in (429, 503):
        return "overload"
    if status == 504:
        return "deadline"
    if status >= 500:
        return "error"
    return "client_error" if status >= 400 else "ok"


class ServerMetrics:
    """Holds its own registry, so that several servers in one process do not collide."""

    def __init__(self, engine: AsyncEngine, plan_hash: str) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "hal_time_to_first_token_seconds",
            "From the arrival of a request until a sequence's first token.",
            registry=self.registry,
            buckets=_TTFT_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "hal_inter_token_latency_seconds",
            "Between two successive tokens of one sequence.",
            registry=self.registry,
            buckets=_TOKEN_BUCKETS,
        )
        self.request_duration = Histogram(
            "hal_request_duration_seconds",
            "From the arrival of a request until its last byte is handed to the connection.",
            ["endpoint"],
            registry=self.registry,
            buckets=_REQUEST_BUCKETS,
        )
        self.requests = Counter(
            "hal_requests", "Finished requests.", ["endpoint", "outcome"], registry=self.registry
        )
        self.active_requests = Gauge(
            "hal_http_requests_active", "HTTP requests being answered.", registry=self.registry
        )
        self.draining = Gauge(
            "hal_draining", "1 while the server refuses new requests.", registry=self.registry
        )
        plan = Gauge(
            "hal_plan_info", "The plan in use; always 1.", ["hash"], registry=self.registry
        )
        plan.labels(hash=plan_hash).set(1)
        build = Gauge(
            "hal_build_info",
            "The halstack that serves; always 1.",
            ["version"],
            registry=self.registry,
        )
        build.labels(version=version("halstack")).set(1)
        self.registry.register(_EngineCollector(engine))
        self.recent_first_tokens = RecentLatencies()
        self.recent_tokens = RecentLatencies()

    def observe_first_token(self, now_s: float, waited_s: float) -> None:
        """A sequence's first token, `waited_s` after its request came. now_s: monotonic."""
        self.time_to_first_token.observe(waited_s)
        self.recent_first_tokens.add(now_s, waited_s)

    def observe_token(self, now_s: float, waited_s: float) -> None:
        """A further token, `waited_s` after the one before it."""
        self.inter_token_latency.observe(waited_s)
        self.recent_tokens.add(now_s, waited_s)

    def text(self) -> bytes:
        """The exposition format of all metrics."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Reads the engine's counters when scraped."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        try:
            families = [*self._stats(), self._op_calls()]
        except EngineDeadError:
            families = []
        alive = 1 if families else 0
        yield GaugeMetricFamily("hal_engine_alive", "0 once the engine has stopped.", value=alive)
        waivers = len(self._engine.degraded_reasons())
        yield GaugeMetricFamily(
            "hal_degraded",
            "1 while the plan needs waivers for lost fast paths.",
            value=min(waivers, 1),
        )
        yield GaugeMetricFamily("hal_waivers_in_use", "Waivers that the plan needs.", value=waivers)
        yield from families

    def _stats(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges: dict[str, tuple[str, float]] = {
            "hal_sequences_running": ("Sequences in the running batch.", stats.running),
            "hal_sequences_waiting": ("Sequences in the queue.", stats.waiting),
            "hal_kv_blocks_used": ("KV blocks that live sequences hold.", stats.kv_blocks_used),
            "hal_kv_blocks_total": ("KV blocks of the pool.", stats.kv_blocks_total),
        }
        counters: dict[str, tuple[str, float]] = {
            "hal_prompt_tokens": ("Prompt tokens received.", stats.prompt_tokens),
            "hal_cached_prompt_tokens": (
                "Prompt tokens taken from the prefix cache.",
                stats.cached_prompt_tokens,
            ),
            "hal_generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "hal_preemptions": ("Sequences preempted to be recomputed.", stats.preemptions),
            "hal_engine_steps": ("Steps of the engine.", stats.steps),
            "hal_engine_replayed_steps": (
                "Steps that ran as one call, the replay of a captured step.",
                stats.replayed_steps,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)

    def _op_calls(self) -> Metric:
        family = CounterMetricFamily(
            "hal_op_calls", "Calls of bound ops, summed over call sites.", labels=OP_LABELS
        )
        for key, calls in op_totals(self._engine.op_calls()).items():
            family.add_metric(key, calls)
        return family
