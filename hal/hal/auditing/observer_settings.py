"""Which of torch's settings are not at their defaults, at the moment of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from hal.auditing.trace import SETTING_DEFAULTS

Settings = tuple[tuple[str, str], ...]
_NO_SETTINGS: Final[Settings] = ()


def _readers() -> tuple[tuple[str, Callable[[], Any]], ...]:
    """In a fixed order; a function that this torch does not have is left out."""
    names = (
        ("grad_enabled", "is_grad_enabled"),
        ("inference_mode", "is_inference_mode_enabled"),
        ("flash_sdp", "_get_flash_sdp_enabled"),
        ("mem_efficient_sdp", "_get_mem_efficient_sdp_enabled"),
        ("cudnn_sdp", "_get_cudnn_sdp_enabled"),
        ("math_sdp", "_get_math_sdp_enabled"),
        ("deterministic_algorithms", "_get_deterministic_algorithms"),
        ("anomaly_mode", "is_anomaly_enabled"),
        ("float32_matmul_precision", "_get_float32_matmul_precision"),
        ("cudnn", "_get_cudnn_enabled"),
        ("cudnn_benchmark", "_get_cudnn_benchmark"),
        ("mkldnn", "_get_mkldnn_enabled"),
    )
    found = ((key, getattr(torch._C, name, getattr(torch, name, None))) for key, name in names)
    return tuple((key, function) for key, function in found if callable(function))


class SettingsReader:
    """Reads them quickly; `seen` is everything that was in force at any call."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        pairs = _readers()
        self._keys = tuple(key for key, _ in pairs)
        self._functions = tuple(function for _, function in pairs)
        self._devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._known: dict[Any, Settings] = {}

    def current(self) -> Settings:
        """Pairs of key and value that differ from torch's defaults."""
        raw = tuple([function() for function in self._functions])  # quicker than a generator
        cast = None
        for device in self._devices:
            if torch.is_autocast_enabled(device):
                cast = torch.get_autocast_dtype(device)
        known = self._known.get((raw, cast))
        return known if known is not None else self._learn(raw, cast)

    def _learn(self, raw: tuple[Any, ...], cast: Any) -> Settings:
        found = [
            (key, str(value))
            for key, value in zip(self._keys, raw, strict=True)
            if str(value) != SETTING_DEFAULTS[key]
        ]
        if cast is not None:
            found.append(("autocast", str(cast).removeprefix("torch.")))
        settings: Settings = tuple(found) if found else _NO_SETTINGS
        self._known[raw, cast] = settings
        self.seen.update(settings)
        return settings
