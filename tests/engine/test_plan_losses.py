"""The table of lost fast paths: each loss is counted once, in the steps that meet it."""

from __future__ import annotations

import pytest

from absent_plans import plan, profile
from hal_engine.cli.plan_report import collect_losses, step_name


@pytest.mark.parametrize(
    ("device", "costs_time"),
    # Of MI300X only collectives are left, for which the link decides, whatever kernel fills it.
    [("rtx-pro-6000-blackwell-server", True), ("mi300x", False)],
)
def test_losses_add_up_to_what_each_step_loses(device: str, costs_time: bool) -> None:
    # Collectives are decided apart for small and large messages, and attention for groups of
    # layers: a step calls one range of each group.
    found = plan("deepseek-v4.1-flash", profile(device), 8)
    losses = collect_losses(found)
    assert losses
    for step in found.steps:
        assert step.is_telling
        assert (step.lost_us > 0) == costs_time
        total = sum(loss.lost_shares.get(step_name(step), 0.0) for loss in losses)
        assert total == pytest.approx(step.lost_us / step.total_us, rel=1e-9)
