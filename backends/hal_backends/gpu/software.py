"""The distributions that candidates ask about, and the version in which each was read.

Detection looks for these beside a device, and the predicate sweep assumes them where it asks what
would serve with everything installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TESTED_VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "amd-aiter": "0.1.14",
        "deep-gemm": "2.5.0",
        "flash-attn": "2.8.3",
        "flash-attn-3": "3.0.0b1",
        "flash-mla": "1.0.0",
        "flashinfer-python": "0.7.4",
        "ixformer": "0.6.0",
        "mate": "0.2.0",
        "sgl-kernel": "0.3.21",
        "torch-mlu-ops": "1.3.2",
        "torch-npu": "2.14.0",
        "vllm-xpu-kernels": "0.1.10",
        "xtorch-ops": "0.1.0",
    }
)
"""Distribution -> version whose signatures and limits the candidates state."""

# What a vendor's own build of a library has behind its version.
_TAGS: Mapping[str, str] = MappingProxyType(
    {"metax": "+metax3.8", "iluvatar": "+corex4.4", "hygon": "+das.opt1", "thead": "+ppu1.5"}
)


def vendor_version(distribution: str, backend: str) -> str:
    """The version as the vendor's own build of the distribution states it."""
    version = TESTED_VERSIONS[distribution]
    return version + _TAGS.get(backend, "") if distribution == "flash-attn" else version
