"""llama.cpp through the `xllamacpp` wheel: its server's slots and continuous batching, in process.

The wheel is a build for any x86-64 CPU with AVX2; `versions()` records the instruction sets that it
was built for, since a build for one machine's AVX-512 or AMX would be faster.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from contenders.protocol import LoadOptions, TokenIds, package_versions
from contenders.weights import gguf_path

REQUEST_DEADLINE_S = 300


class LlamaCpp:
    """precision: a GGUF type (F32, Q8_0, Q4_0, Q4_1)."""

    def __init__(self) -> None:
        self._server: Any = None
        self._clients: ThreadPoolExecutor | None = None

    def versions(self) -> dict[str, str]:
        import xllamacpp

        instructions = xllamacpp.get_system_info().strip()
        return package_versions("xllamacpp") | {"built for": instructions}

    def load(self, options: LoadOptions) -> None:
        import xllamacpp

        model = gguf_path(options.models, options.precision)
        params = server_parameters(
            model, options.max_sequences, options.max_length, options.threads
        )
        self._server = xllamacpp.Server(params)
        self._clients = ThreadPoolExecutor(options.max_sequences)

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[list[int]]:
        if self._clients is None:
            raise RuntimeError("llama.cpp: load() comes before generate()")
        jobs = [self._clients.submit(self._complete, p, new_tokens) for p in prompts]
        return [job.result() for job in jobs]

    def _complete(self, prompt: TokenIds, new_tokens: int) -> list[int]:
        """Through the server's own endpoint: only there the answer has token ids."""
        request = {
            "prompt": list(prompt),
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        post = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            data=json.dumps(request).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(post, timeout=REQUEST_DEADLINE_S) as answer:
            return [int(token) for token in json.load(answer)["tokens"]]

    def close(self) -> None:
        if self._clients is not None:
            self._clients.shutdown()
        self._server = None


def server_parameters(model: Path, slots: int, max_length: int, threads: int) -> Any:
    """One slot per sequence, each with room for the longest; no cache between requests."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel = slots
    params.n_ctx = slots * max_length
    params.n_batch = 2048
    params.n_ubatch = 512
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.warmup = True
    return params


def main() -> int:
    """`python -m contenders.llama_cpp FILE --port N`: only its server, until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=1024)
    chosen = parser.parse_args()
    import xllamacpp

    params = server_parameters(chosen.model, chosen.slots, chosen.max_length, chosen.threads)
    params.port = chosen.port
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
