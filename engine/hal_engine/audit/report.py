"""From what was observed to the report."""

from __future__ import annotations

import datetime
from fnmatch import fnmatchcase

from hal.auditing.audit_waivers import AuditWaivers
from hal.auditing.document import AuditReport, Finding, Machine, Verification
from hal.auditing.refusals import mark_refusals, refusals_since
from hal.auditing.surroundings import complete_report
from hal.device import Confidence, DeviceSpec
from hal.plugins.registry import BackendRegistry
from hal_engine.audit import findings as found
from hal_engine.audit.findings import SeenSite
from hal_engine.audit.profiling import unseen_findings
from hal_engine.audit.ranks import rank_findings
from hal_engine.audit.rows import coverage_of, host_rows, outside_row, planned_row
from hal_engine.audit.running import AuditOptions, Observed, observe_model
from hal_engine.building import Progress
from hal_engine.planning import PlannedModel
from hal_engine.serving import model_id
from hal_engine.worker_starting import WorkerOrder


def audit_model(
    planned: PlannedModel,
    registry: BackendRegistry,
    options: AuditOptions | None = None,
    waivers: AuditWaivers | None = None,
    order: WorkerOrder | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Loads the model, runs it, and reports. Raises what loading raises."""
    mark = mark_refusals()
    observed = observe_model(planned, registry, options or AuditOptions(), order, progress)
    return complete_report(
        report_of(observed),
        device_type=observed.device.torch_device,
        refusals=refusals_since(mark),
        waivers=waivers,
    )


def report_of(observed: Observed) -> AuditReport:
    """The report of a run, without what lies around it."""
    planned, options = observed.planned, observed.options
    counts = _counts(observed)
    sites = [
        SeenSite(
            record=record,
            row=planned_row(
                record,
                _calls(observed, counts[id(record)], record.num_watched),
                observed.device,
                planned.plan.link,
            ),
        )
        for record in observed.observer.records
    ]
    outside = list(observed.mode.outside.values())
    rows = [
        *(seen.row for seen in sites),
        *(row for seen in sites for row in host_rows(seen.record)),
        *map(outside_row, sorted(outside, key=lambda seen: -seen.ns)),
    ]
    coverage = coverage_of(rows)
    all_us = sum(work.time_us or 0.0 for work in coverage.values())
    return AuditReport(
        kind="model",
        subject=model_id(planned),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        mode=options.mode,
        machine=machine_of(observed.device),
        versions=dict(planned.plan.versions),
        plan_hash=planned.plan.hash,
        time_us=round(all_us, 3),
        coverage=coverage,
        rows=tuple(rows),
        findings=tuple(_findings(observed, sites, counts, all_us)),
        verification=_verification(observed),
        processes=planned.options.tp,
        notes=tuple(_notes(observed, sites)),
    )


def _counts(observed: Observed) -> dict[int, int]:
    """Calls by the bound ops' counters, by id of the record: both are in the order of binding."""
    counted = observed.counts or observed.ops.counts()
    return {
        id(record): count.calls
        for record, count in zip(observed.observer.records, counted, strict=True)
    }


def _calls(observed: Observed, counted: int, watched: int) -> int:
    """Calls that the load made: in full mode each was made once more to be watched."""
    return counted - watched if observed.options.mode == "full" else counted


def _findings(
    observed: Observed, sites: list[SeenSite], counts: dict[int, int], all_us: float
) -> list[Finding]:
    outside = list(observed.mode.outside.values())
    accepted = observed.planned.options.allow_semantics

    def is_allowed(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in accepted)

    findings = [
        *found.unrouted(outside, all_us),
        *found.lost_paths(sites, all_us),
        *found.semantic_changes(sites, all_us, is_allowed),
        *found.number_findings(observed.inspector),
        *found.leaf_findings(sites, all_us),
        *found.host_findings(sites, outside, all_us),
    ]
    if not observed.is_live:
        findings += found.never_exercised(sites, observed.load)
    if observed.options.mode == "full":
        findings += found.counter_findings(sites, counts)
    findings += rank_findings(observed.counts, observed.worker_counts)
    findings += unseen_findings(observed.profiled, frozenset(observed.mode.product_names))
    return findings


def machine_of(device: DeviceSpec) -> Machine:
    """The device with the rates that bounds rest on."""
    evidence = device.evidence.get("memory_bandwidth")
    return Machine(
        label=device.name,
        device_id=device.device_id,
        arch=device.arch,
        peak_flops=dict(device.peak_flops),
        memory_bandwidth=device.memory_bandwidth,
        is_measured=evidence is not None and evidence.confidence is Confidence.MEASURED,
    )


def _verification(observed: Observed) -> Verification | None:
    inspector = observed.inspector
    first = inspector.non_finite[0].site if inspector.non_finite else None
    if not inspector.share and first is None:
        return None
    worst = inspector.worst
    return Verification(
        share=inspector.share,
        compared_calls=inspector.num_compared,
        skipped_calls=sum(inspector.skipped.values()),
        worst=None if worst is None else min(worst.ratio, 1e300),
        worst_site=None if worst is None else worst.site,
        first_divergence=inspector.divergences[0].site if inspector.divergences else None,
        first_non_finite=first,
    )


def _sampled(observed: Observed) -> str:
    sampler = observed.sampler
    watched, timed = (0, 0) if sampler is None else (sampler.num_watched, sampler.num_timed)
    return (
        f"light mode: of {observed.num_steps:,} steps {timed:,} were timed and {watched:,} watched "
        "(the first of each size, then few); times are scaled up"
    )


def _notes(observed: Observed, sites: list[SeenSite]) -> list[str]:
    options, step = observed.options, observed.mode
    if options.mode == "full":
        notes = ["each batch ran twice: watched, then timed; times are of the second run"]
    else:
        notes = [_sampled(observed)]
    escaped = sum(seen.calls for seen in step.outside.values() if seen.is_product)
    notes.append(
        f"{step.num_products:,} torch matrix products, attentions and collectives seen, "
        f"{escaped:,} outside a bound op"
    )
    inside_us = sum(s.row.time_us or 0.0 for s in sites if not s.record.site.startswith("sampler"))
    forward_us = observed.forward_ns / 1e3
    if forward_us and options.mode == "full":
        rest = max(0.0, 1.0 - inside_us / forward_us)
        notes.append(
            f"{observed.num_steps} steps; {rest:.0%} of the forwards' wall time is between the "
            "bound ops: the interpreter, input tensors, and what is outside"
        )
    for reason, calls in observed.inspector.skipped.items():
        notes.append(f"{calls} calls were not compared with the reference: {reason}")
    for tokens, why in dict.fromkeys(
        (str(t), w) for (_, t), w in observed.load.unreachable.items()
    ):
        notes.append(f"the range of {tokens} tokens cannot be reached: {why}")
    if observed.worker_counts:
        notes.append(
            f"rows are of rank 0; counters of {len(observed.worker_counts) + 1} ranks were compared"
        )
    notes += [f"a request ended with an error: {error}" for error in observed.errors[:5]]
    return notes
