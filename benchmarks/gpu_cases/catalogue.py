"""All cases in the order of a run, and which kernels none of them launches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpu_cases import (
    attention,
    collectives,
    expert_products,
    fused_products,
    native_sparse,
    one_pass,
    products,
    routing,
    rows,
    sparse,
    streams,
    wide_rows,
)
from gpu_cases.case import CaseMaker
from hal_kernels.aot.catalogue import CATALOGUE

_MODULES = (
    products,
    expert_products,
    fused_products,
    attention,
    sparse,
    native_sparse,
    routing,
    rows,
    one_pass,
    wide_rows,
    streams,
    collectives,
)


def all_makers() -> tuple[CaseMaker, ...]:
    """A case of each kernel first, so that a run that ends early has seen as many as it could."""
    makers = [maker for module in _MODULES for maker in module.makers()]
    return tuple(_new_kernels_first(makers))


def _new_kernels_first(makers: list[CaseMaker]) -> Iterator[CaseMaker]:
    seen: set[str] = set()
    later = []
    for maker in makers:
        if seen.issuperset(maker.kernels):
            later.append(maker)
            continue
        seen.update(maker.kernels)
        yield maker
    yield from later


def kernels_without_a_case(makers: Iterable[CaseMaker]) -> list[str]:
    """Names of the catalogue that no case says it launches."""
    covered = {kernel for maker in makers for kernel in maker.kernels}
    return sorted(set(CATALOGUE) - covered)


def unknown_kernels(makers: Iterable[CaseMaker]) -> list[str]:
    """Names that a case says it launches and that the catalogue does not have."""
    return sorted({kernel for maker in makers for kernel in maker.kernels} - set(CATALOGUE))
