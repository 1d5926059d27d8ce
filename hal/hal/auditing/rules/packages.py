"""Rules for packages that are not made for this device, and for fallbacks that are announced.

Both are read from what the program was told: warnings, log lines and errors it caught.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hal.auditing.document import Location
from hal.auditing.gates import GateClass
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex

MAX_TEXT = 200

_WRONG_ARCH = re.compile(
    r"no kernel image is available"
    r"|is not compatible with the current PyTorch installation"
    r"|was not compiled (?:for|with)"
    r"|not compiled with (?:CUDA|ROCm|XPU|support for)"
    r"|compiled without (?:CUDA|GPU|ROCm|AVX|support)"
    r"|built (?:for|with) (?:sm_|gfx|compute_|CUDA)"
    r"|unsupported (?:gpu |gfx|sm)?arch"
    r"|undefined symbol"
    r"|wrong ELF class|invalid ELF header|cannot open shared object file"
    r"|requires (?:compute capability|sm_\d|AVX|AMX|Ampere|Hopper)"
    r"|only supports? (?:Ampere|Hopper|Ada|compute capability|sm_\d|gfx)"
    r"|(?:no|without) (?:kernel|code) for (?:sm_|gfx|this (?:arch|device|CPU))"
    r"|illegal instruction",
    re.IGNORECASE,
)
_FALLBACK = re.compile(
    r"fall(?:ing|s|en)?[ -]?back (?:to|on)"
    r"|fast path is not available|CUDA is not available\. Disabling"
    r"|(?:flash[-_ ]?attn|flash attention|xformers|triton|apex|causal[-_]conv1d|mamba[-_]ssm)"
    r"[^.]{0,80}(?:not (?:installed|available|found|importable)|missing|unavailable)"
    r"|using (?:the )?(?:slow|naive|eager|reference|default) (?:implementation|path|version|config)"
    r"|performance (?:might|may|will) be (?:sub-?optimal|degraded|slow)",
    re.IGNORECASE,
)


def _texts(index: TraceIndex) -> Iterator[tuple[str, str, Location | None, int]]:
    """(text, source, place, times) of everything the program was told."""
    for message in index.trace.messages:
        yield message.text, message.category, message.location, 1
    for error in index.trace.swallowed:
        source = f"{error.kind} of {error.raised_by}" if error.raised_by else error.kind
        yield error.text, source, error.location, error.calls


def is_about_arch(text: str) -> bool:
    """Whether a message says that a package has no code for the device."""
    return _WRONG_ARCH.search(text) is not None


def _wrong_arch(index: TraceIndex) -> Iterator[Hit]:
    arch = index.trace.machine.arch or index.trace.machine.label
    for text, source, location, calls in _texts(index):
        if is_about_arch(text):
            line = " ".join(text.split())[:MAX_TEXT]
            yield Hit(
                title=f"a package without code for this device: {line}",
                location=location,
                evidence=(evidence(source or "message", f"code for {arch}", line),),
                calls=calls,
            )


def _announced(index: TraceIndex) -> Iterator[Hit]:
    for message in index.trace.messages:
        if _FALLBACK.search(message.text) and not is_about_arch(message.text):
            line = " ".join(message.text.split())[:MAX_TEXT]
            yield Hit(
                title=f"a fallback that the program was told of: {line}",
                location=message.location,
                evidence=(evidence(message.category or "message", "no fallback", line),),
                calls=1,
            )


RULES = (
    Rule(
        id="wrong-arch-package",
        gate=GateClass.LOST_FAST_PATH,
        summary="a warning or a caught error that says a package was built without this device",
        remedy="install the build of the package that is made for this device",
        check=_wrong_arch,
    ),
    Rule(
        id="announced-fallback",
        gate=GateClass.LOST_FAST_PATH,
        summary="a warning or log line that says that a library falls back to something slower",
        remedy="install or enable what the message names",
        check=_announced,
    ),
)
