"""Every error class of the hardware layer, and the one message format they share.

A message names who complains, what was required, what was found and the remedy, so that
the reader can act on it without reading code.
"""

from typing import Any, Self

from hal.refusal_log import REFUSALS


class UserError(Exception):
    """An error whose message is for the user: `hal` prints it without a traceback, exit code 2.

    Other packages derive from it as well: `class ModelFileError(UserError, ValueError)`. Each one
    is remembered, so that an audit shows it even if the program swallowed it.
    """

    exit_code = 2
    refusal_number = 0

    def __new__(cls, *args: object, **fields: object) -> Self:
        error = super().__new__(cls, *args)
        error.refusal_number = REFUSALS.note_made(error)
        return error

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        own = self.refusal_number  # that of the state is another process's
        super().__setstate__(state)
        self.refusal_number = own

    def __del__(self) -> None:
        REFUSALS.note_end(self, self.refusal_number)


class HalError(UserError):
    """Root of the errors of the hardware layer.

    Args:
        who: the component, plug-in, file or call site that complains.
        required: what it needed.
        found: what it got instead.
        remedy: what the reader can do about it.
    """

    def __init__(self, who: str, required: str, found: str, remedy: str) -> None:
        # All four go to Exception.args, which keeps the error picklable across processes.
        super().__init__(who, required, found, remedy)
        self.who = who
        self.required = required
        self.found = found
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"{self.who}\n  required: {self.required}\n  found:    {self.found}"
            f"\n  remedy:   {self.remedy}"
        )

    def one_line(self) -> str:
        """The same message on one line, for tables and logs."""
        text = f"{self.who}: required {self.required}; found {self.found}; remedy: {self.remedy}"
        return " ".join(text.split())

    def to_document(self) -> dict[str, str]:
        """The message as a JSON-ready dictionary."""
        return {
            "error": type(self).__name__,
            "who": self.who,
            "required": self.required,
            "found": self.found,
            "remedy": self.remedy,
        }


class SettingsError(HalError):
    """A setting is unknown, malformed, contradictory or consumed by nobody."""


class WaiverError(HalError):
    """A waiver is malformed, expired, unused, over-broad or used beyond its share."""


class HostReadError(HalError):
    """Something exists on the host but cannot be read, or a command cannot be run."""


class PluginError(HalError):
    """A plug-in could not be loaded, or one of its hooks failed or answered nonsense."""


class PluginRejectedError(PluginError):
    """A plug-in was refused before any of its code but `hal_backend_info` ran."""


class ProbeLimitError(PluginError):
    """The probe of a plug-in met its deadline, or its limit of memory, output or answer."""


class DeviceClaimError(PluginError):
    """Two distributions claim the same device."""


class DetectionError(HalError):
    """A device is present but its description cannot be obtained."""


class DeviceNotFoundError(HalError):
    """A device was asked for that no loaded plug-in has detected."""


class RequestError(HalError):
    """An op request is inconsistent, or names an op the catalogue does not have."""


class SelectionError(HalError):
    """No candidate may serve a request, or an explicit choice cannot be honoured."""


class UnservedRequestError(SelectionError):
    """Nothing serves a request, though the user forced nothing."""


class PlanError(HalError):
    """A plan cannot be made, read, or does not fit what it is applied to."""


class BindingError(HalError):
    """A chosen candidate cannot be bound to its call site."""


class CaptureError(HalError):
    """A step cannot be captured, to be replayed as one call."""


class RoutingError(HalError):
    """Somebody else's model cannot be routed through bound ops, or was called as it cannot be."""


class UsageError(HalError):
    """A command line is wrong: an unknown command, option or value."""


class DocumentError(HalError):
    """A report, lock or plan that was named cannot be read, or cannot be written there."""


class AuditError(HalError):
    """An audit of a program cannot begin or end here, or its gate failed."""


class KernelTuningError(HalError):
    """A configuration of a kernel cannot be measured here, or nothing would say what was."""


class KernelSourceError(HalError):
    """The source or the declaration of a kernel is in error, so that nothing can be compiled."""


class KernelCompilerError(HalError):
    """A compiler of kernels did not run to its end on this machine, which says nothing about the
    kernel."""


class KernelEvidenceError(HalError):
    """Kernels compile to something else than the stored evidence says: what a check found."""

    exit_code = 1


class KernelBuildError(HalError):
    """The machine code of a chosen implementation could not be made for its device.

    who: `<implementation> for <op>`, of which `implementation` is the first part, and the rank
    where it is not rank 0. others: what other ranks could not make.
    """

    others: tuple["KernelBuildError", ...] = ()

    @property
    def where(self) -> str:
        """ " on rank 1"; "" on rank 0 and where there is one rank."""
        _, on, rank = self.who.rpartition(" on rank ")
        return on + rank if on else ""

    @property
    def failures(self) -> tuple["KernelBuildError", ...]:
        """This and what other ranks could not make."""
        return (self, *self.others)

    @property
    def implementation(self) -> str:
        """The name of the candidate."""
        return self.who.partition(" for ")[0]
