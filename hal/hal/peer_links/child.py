"""The process in which one pair of devices is checked: `-m hal.peer_links.child RESULT_FD`.

Reads the plug-in and its two devices from standard input, makes both usable through the plug-in's
runtime, and writes the outcome to the descriptor. What hangs or crashes here is one pair's outcome.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from hal.device import DeviceSpec
from hal.errors import HalError, UserError
from hal.peer_links.exchange import verify_pair
from hal.peer_links.outcome import PairOutcome
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import import_plugin, register_plugin
from hal.plugins.validation import from_document


def main(descriptor: int) -> None:
    """Check one pair."""
    request: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    entry = PluginEntry(**request["entry"])
    plugin = Plugin(register_plugin(entry, import_plugin(entry)))
    first, second = (from_document(DeviceSpec, document) for document in request["devices"])
    ids = (first.device_id, second.device_id)
    try:
        outcome = verify_pair(ids, plugin.create_runtime(first), plugin.create_runtime(second))
    except UserError as error:
        said = error.found if isinstance(error, HalError) else str(error)
        outcome = PairOutcome(first=ids[0], second=ids[1], verdict="failed", detail=said[:300])
    os.write(descriptor, json.dumps(asdict(outcome)).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
