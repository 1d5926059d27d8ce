"""What a platform forces on and off, in the form that each vendor's policy fills in.

Two decisions that hold for every vendor outside of the CUDA and ROCm ecosystems: a model that has
sparse attention runs it, since those platforms' serving recipes leave it off and then run another
model without an error; and mechanisms that exist on NVIDIA's or AMD's chips only are disabled by
name, so that no plug-in's candidate for them is ever tried there.
"""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import EAGER, SPARSE_ATTENTION, DevicePolicy, DeviceSpec

# Globs over candidate names, of every op: what exchanges through memory that peers have mapped.
PEER_MEMORY = (
    "*.*one_shot*",
    "*.*two_shot*",
    "*.collective.triton_reduce_scatter*",
    "*.collective.triton_all_gather*",
)
# Glob over candidate names -> what the mechanism is tied to.
FOREIGN_MECHANISMS: Mapping[str, str] = {
    **dict.fromkeys(PEER_MEMORY, "sums through peers' memory are written for NVLink and xGMI"),
    "*.collective.*symmetric*": "torch's symmetric memory needs CUDA's virtual memory handles",
    "*.collective.*pcie_ipc*": "CUDA IPC handles",
    "*.deep_gemm*": "DeepGEMM is compiled for Hopper's and Blackwell's matrix instructions",
    "*.flashinfer*": "FlashInfer is compiled for CUDA architectures",
    "*_cudnn*": "cuDNN runs on NVIDIA's chips",
    "*.aiter*": "AITER is compiled for AMD's CDNA",
    "*.*_tma*": "the tensor memory accelerator is Hopper's and Blackwell's",
}


def foreign_platform_policy(
    device: DeviceSpec,
    *,
    vendor: str,
    source: str,
    sparse: str = "",
    allows: tuple[str, ...] = (),
    disables: Mapping[str, str] | None = None,
    eager: str = "",
) -> DevicePolicy:
    """The policy of a platform outside of CUDA and ROCm.

    sparse: what its recipes do with sparse attention, for the reason. source: where that is seen.
    allows: globs of FOREIGN_MECHANISMS that the platform does have. disables: more globs, with
    reasons. eager: why steps are not captured as a graph; "" where the platform captures them.
    """
    forced = {
        SPARSE_ATTENTION: f"{vendor}: {sparse or 'dense attention for a sparse model is another'}"
        f"{'' if sparse else ' model, without an error'} ({source})"
    }
    if eager:
        forced[EAGER] = f"{vendor}: {eager}"
    elif "graph_capture" not in device.features:
        forced[EAGER] = f"{vendor}: no verified graph capture on {device.arch}"
    disabled = {
        glob: f"{why}, not {vendor}'s"
        for glob, why in FOREIGN_MECHANISMS.items()
        if glob not in allows
    }
    return DevicePolicy(forced_features=forced, disabled=disabled | dict(disables or {}))
