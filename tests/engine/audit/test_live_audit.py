"""The audit of an engine that serves: a report at any moment, from sampled steps and counters."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hal.auditing.document import AuditReport
from hal.plugins.manager import load_backends
from hal.waivers import WaiverBook
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_all
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.serving import start_engine
from model_audits import ENVIRONMENT, OPTIONS


def started(folder: Path, every: int) -> Engine:
    registry = load_backends()
    options = EngineOptions(**OPTIONS)
    planned = plan_model(folder, options, registry, WaiverBook(), {}, must_run=True)
    return start_engine(planned, registry, audit_every=every)


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=(4, 5, 6 + number),
            sampling=SamplingParams(max_tokens=40, ignore_eos=True),
        )
        for number in range(count)
    ]


def test_reports_while_it_serves(shallow_folder: Path) -> None:
    async def serve(engine: Engine) -> tuple[list[str], str]:
        """Reports that were asked for while requests ran, and one at the end."""
        running = asyncio.create_task(generate_all(engine, requests(4)))
        texts = []
        while not running.done():
            text = await asyncio.to_thread(engine.audit_report)
            assert text is not None
            texts.append(text)
        last = engine.audit_report()
        assert last is not None
        await running
        await engine.close()
        return texts, last

    texts, last = asyncio.run(serve(started(shallow_folder, 4)))
    for text in texts:
        AuditReport.model_validate_json(text)
    report = AuditReport.model_validate_json(last)
    assert report.mode == "light"
    assert {f.gate for f in report.findings} <= {ENVIRONMENT}
    decode = [r for r in report.rows if r.op == "attention" and r.phase == "decode"]
    assert {row.leaf.state for row in decode} == {"seen"}
    assert all(row.calls >= 40 for row in decode)
    assert all(row.time_us is not None for row in decode)


def test_off_by_default(shallow_folder: Path) -> None:
    engine = started(shallow_folder, 0)
    try:
        assert engine.audit_report() is None
    finally:
        asyncio.run(engine.close())
