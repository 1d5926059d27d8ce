"""What detection may look at: files, links, environment, packages and commands of a host.

Detection never touches the operating system itself; it asks a `HostProbe`. A recorded host
is therefore as good as a real one for planning and for tests. This file gathers the names; the
hosts are in `host_local` and `host_recorded`, the recording's format in `host_document`.
"""

from hal.host_document import HOST_SCHEMA
from hal.host_local import LocalHost
from hal.host_probe import PYTHON, CommandOutput, HostProbe
from hal.host_recorded import RecordedHost, load_recorded_host
from hal.host_recording import RecordingHost

TransferableHost = LocalHost | RecordedHost | RecordingHost
"""The hosts that can be handed to a probing child process."""

__all__ = [
    "HOST_SCHEMA",
    "PYTHON",
    "CommandOutput",
    "HostProbe",
    "LocalHost",
    "RecordedHost",
    "RecordingHost",
    "TransferableHost",
    "load_recorded_host",
]
