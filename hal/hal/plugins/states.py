"""What became of each plug-in, and why."""

from dataclasses import dataclass
from enum import StrEnum

from hal.plugins.listing import PluginEntry


class PluginStatus(StrEnum):
    """The one word for what became of a plug-in."""

    LOADED = "loaded"
    """Imported into this process; its hooks are in use."""
    IDLE = "idle"
    """Sound, but nothing for it to do here: never imported into this process."""
    REJECTED = "rejected"
    """Refused before its hooks ran: wrong API range, malformed entry point, name mismatch."""
    FAILED = "failed"
    """It raised, crashed, hung, or answered something that is not what the hook promises."""
    SHADOWED = "shadowed"
    """Another copy of the same distribution comes first on the import path."""

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should do something about it."""
        return self in (PluginStatus.REJECTED, PluginStatus.FAILED)


@dataclass(frozen=True, slots=True)
class PluginState:
    """One plug-in's state. `reason` says who, required, found, remedy; empty when loaded."""

    entry: PluginEntry
    status: PluginStatus
    reason: str = ""
    detail: str = ""

    def to_document(self) -> dict[str, str]:
        """JSON-ready."""
        return {
            "name": self.entry.name,
            "distribution": self.entry.distribution,
            "version": self.entry.version,
            "value": self.entry.value,
            "location": self.entry.location,
            "status": self.status.value,
            "reason": self.reason,
            "detail": self.detail,
        }
