"""The hardware abstraction layer: requests, selection, plans, plug-ins, bound ops.

Importing it runs nothing of a plug-in and does not import torch.
"""

from typing import TYPE_CHECKING, Any

from hal.hookspecs import hookimpl

if TYPE_CHECKING:
    from hal.auditing.program import audit

__all__ = ["audit", "hookimpl"]


def __getattr__(name: str) -> Any:
    """`hal.audit`, imported when it is used: it brings pydantic."""
    if name == "audit":
        from hal.auditing.program import audit

        return audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
