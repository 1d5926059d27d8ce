"""Serves the fake engine, for tests that send signals.

Arguments: settings as JSON, and seconds that the engine's end takes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from fake_engine import FakeEngine

from hal_engine.server.config import ServerConfig
from hal_engine.server.run import run_server


class NoisyEngine(FakeEngine):
    async def close(self) -> None:
        sys.stdout.write("engine closes\n")
        sys.stdout.flush()
        await asyncio.to_thread(time.sleep, float(sys.argv[2]))  # as an engine thread that is busy
        sys.stdout.write("engine closed\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_server(NoisyEngine(), ServerConfig(**json.loads(sys.argv[1]))))
