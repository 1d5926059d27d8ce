"""`hal plan MODEL`: what would run, chosen from config.json alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hal_engine.cli import arguments as args
from hal_engine.cli.plan_table import print_plan


def plan(
    ctx: typer.Context,
    model: args.Model,
    precision: args.Precision = None,
    device: args.Device = None,
    tp: args.TensorParallel = None,
    use: args.Use = None,
    waivers: args.Waivers = None,
    set_: args.Set = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the plan as JSON; - is standard output.")
    ] = None,
    losers: Annotated[
        bool, typer.Option("--losers", help="Show every candidate that was not chosen, and why.")
    ] = False,
) -> None:
    """Show every op of a model with its implementation, tier, and why better ones lost.

    Reads config.json or a GGUF header, never a weight. Fails if a fast path is lost.
    """
    session = args.read_session(
        ctx,
        model,
        consumer="hal plan",
        assignments=set_,
        use=use,
        flags={
            "engine.precision": precision,
            "engine.device": device,
            "engine.tp": tp,
            "selection.waivers": waivers,
        },
    )
    planned, _ = args.plan_session(session)
    if json_ is not None:
        text = json.dumps(planned.plan.to_dict(), indent=1, ensure_ascii=False)
        if str(json_) == "-":
            sys.stdout.write(text + "\n")
        else:
            json_.write_text(text + "\n", encoding="utf-8")
        return
    print_plan(planned.plan, with_losers=losers)
