"""Where a program sets a setting of torch: the line that made it differ from torch's default.

Torch's setters are wrapped while an audit runs. The compiler knows them by their identity, so it
gets to know torch's own before they are wrapped, and while it is imported they are unwrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from hal.auditing.document import Location
from hal.auditing.observer_frames import FrameReader
from hal.auditing.trace import SETTING_DEFAULTS

_C: Final = torch._C
# Setter, setting, getter; the two of anomaly mode are called as functions of torch itself.
_SETTERS: Final = (
    (_C, "_set_sdp_use_flash", "flash_sdp", "_get_flash_sdp_enabled"),
    (_C, "_set_sdp_use_mem_efficient", "mem_efficient_sdp", "_get_mem_efficient_sdp_enabled"),
    (_C, "_set_sdp_use_cudnn", "cudnn_sdp", "_get_cudnn_sdp_enabled"),
    (_C, "_set_sdp_use_math", "math_sdp", "_get_math_sdp_enabled"),
    (
        _C,
        "_set_deterministic_algorithms",
        "deterministic_algorithms",
        "_get_deterministic_algorithms",
    ),
    (
        _C,
        "_set_float32_matmul_precision",
        "float32_matmul_precision",
        "_get_float32_matmul_precision",
    ),
    (_C, "_set_cudnn_enabled", "cudnn", "_get_cudnn_enabled"),
    (_C, "_set_cudnn_benchmark", "cudnn_benchmark", "_get_cudnn_benchmark"),
    (_C, "_set_mkldnn_enabled", "mkldnn", "_get_mkldnn_enabled"),
    (torch, "set_anomaly_enabled", "anomaly_mode", "is_anomaly_enabled"),
)
# Properties of torch.backends, which keep their setters: module, property, setting, getter.
_PROPERTIES: Final = (
    ("torch.backends.cudnn", "enabled", "cudnn", "_get_cudnn_enabled"),
    ("torch.backends.cudnn", "benchmark", "cudnn_benchmark", "_get_cudnn_benchmark"),
    ("torch.backends.mkldnn", "enabled", "mkldnn", "_get_mkldnn_enabled"),
)


class SettingPlaces:
    """Installed while an audit runs."""

    def __init__(self, frames: FrameReader) -> None:
        self.found: dict[str, Location] = {}
        self._frames = frames
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """From here on the lines that set something are noted."""
        if self._undo:
            return
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None and hasattr(rules, "get_torch_obj_rule_map"):
            rules.get_torch_obj_rule_map()
        for holder, name, key, getter in _SETTERS:
            self._patch(holder, name, key, getter)
        for module, name, key, getter in _PROPERTIES:
            found = vars(type(sys.modules.get(module))).get(name)
            if found is not None:
                self._patch(found, "setter", key, getter)

    def restore(self) -> None:
        """As it was."""
        for holder, name, original in reversed(self._undo):
            setattr(holder, name, original)
        self._undo.clear()

    def _patch(self, holder: Any, name: str, key: str, getter: str) -> None:
        original = getattr(holder, name, None)
        read = getattr(_C, getter, None) or getattr(torch, getter, None)
        if original is None or read is None:
            return
        self._undo.append((holder, name, original))
        setattr(holder, name, self._noting(original, key, read))

    def _noting(
        self, original: Callable[..., Any], key: str, read: Callable[[], Any]
    ) -> Callable[..., Any]:
        default = SETTING_DEFAULTS[key]

        def set_and_note(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if key not in self.found and str(read()) != default:
                place = self._frames.program_location(sys._getframe(1))
                if place is not None:
                    self.found[key] = place
            return result

        return set_and_note
