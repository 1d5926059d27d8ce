"""The end of `torch.inference_mode` while modes come and go within it.

Torch saves there which dispatch keys are on, the one of modes among them, and puts them back at the
end: a mode that was taken off in between would leave its key on, and the next op without a mode
would fail. So the key is set right again behind every such end, also behind one that comes after
the audit's own.
"""

from __future__ import annotations

from typing import Any

import torch

from hal.auditing.mode_stack import settle_keys


class InferenceExits:
    """Installed while an audit runs."""

    def __init__(self, mode: Any) -> None:
        """mode: any dispatch mode."""
        self._mode = mode
        self._original: Any = None
        self._is_closing = False

    def install(self) -> None:
        """From here on the keys are set right."""
        kind: Any = torch.inference_mode
        self._original = original = kind.__exit__

        def __exit__(context: Any, *error: Any) -> Any:
            result = original(context, *error)
            settle_keys(self._mode)
            if self._is_closing and not torch.is_inference_mode_enabled():
                self._remove()
            return result

        kind.__exit__ = __exit__

    def restore(self) -> None:
        """As it was; within inference mode only when that has ended."""
        if torch.is_inference_mode_enabled():
            self._is_closing = True
        else:
            self._remove()

    def _remove(self) -> None:
        kind: Any = torch.inference_mode
        if self._original is not None:
            kind.__exit__ = self._original
            self._original = None
