"""A candidate is judged by every kernel that it launches: none is compiled and never asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from gpu_cases import catalogue
from gpu_cases.case import Bench, CaseMaker

from hal_backends.gpu.triton_kernels import FOLDERS, op_limits
from hal_kernels.aot.limits import evidence_asked

# Collectives are bound to buffers of peers: tests/kernels/triton/test_triton_collective.py.
MAKERS = [
    maker
    for maker in catalogue.all_makers()
    if not all(kernel.startswith("collective.") for kernel in maker.kernels)
]
# Kernel -> why the limits of what launches it ask for none of its code.
NOT_JUDGED: Mapping[str, str] = {
    "quantize.groups": "rounds rows before an FP8 product; judged as the op that it is by itself",
    "quantize.codes": "as quantize.groups, where Triton does not convert to FP8",
}


class Binds:
    """Takes the place of the `bind` of every op, and keeps what was asked of the evidence for each
    request that is bound."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: set[str] = set()
        for op, folder in FOLDERS.items():
            module = importlib.import_module(f"hal_kernels.{folder}.triton")
            limits = op_limits(op)
            if limits is not None:
                monkeypatch.setattr(module, "bind", self._asking(module.bind, limits))

    def _asking(self, bind: Callable[..., Any], limits: Callable[..., Any]) -> Callable[..., Any]:
        def asking(request: Any, device: Any, *arguments: Any, **static: Any) -> Any:
            found = evidence_asked(limits, request, device)
            self.asked.update(query.kernel for query in found)
            return bind(request, device, *arguments, **static)

        return asking


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)
def test_what_a_call_launches_is_what_its_candidate_is_judged_by(
    maker: CaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases of the check for a GPU have every kernel of the catalogue, and tests of theirs
    prove that, and that each launches what it names. Here: that limits asked for all of these."""
    binds = Binds(monkeypatch)
    maker.make(Bench(is_dry=True))
    assert set(maker.kernels) - binds.asked <= NOT_JUDGED.keys()
