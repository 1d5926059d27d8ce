"""Top-k and top-p on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf
from hal.device import DeviceSpec
from hal.ops.sampling import TopKTopPRequest
from hal.tiers import Tier
from hal_backends.cpu.limits import vector_unit


def _load() -> Bind:
    from hal_kernels.sampling.cpu import bind_top_k_top_p

    def bind(request: TopKTopPRequest) -> Kernel:
        return bind_top_k_top_p(vocab_size=request.vocab_size)

    return bind


def candidates(device: DeviceSpec) -> Sequence[KernelCandidate]:
    return (
        KernelCandidate(
            name="cpu.sample.top_k_top_p.jit",
            op="sample.top_k_top_p",
            tier=Tier.NATIVE,
            summary="by thresholds over bins, without sorting the vocabulary",
            not_supported_reasons=lambda r: vector_unit(device),
            load=_load,
            leaf=(
                Leaf(kind="symbol", name="hal_kernels.sampling"),
                Leaf(kind="instruction", name="vmaxps"),
            ),
        ),
    )
