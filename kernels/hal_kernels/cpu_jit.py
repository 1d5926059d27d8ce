"""Compiles CPU kernels with numba, and keeps what was compiled on disk.

A kernel ("worker") is written as

    def worker(arguments, begin, end, thread):   # four int64
        args = pointer_int64(arguments)
        x = pointer_float32(args[0])
        for item in range(begin, end): ...

``arguments`` is the address of the int64 values given to the launch (see ``cpu_launch``): addresses
and numbers. Sizes that the inner loops should know (head_dim, ...) are closure constants of
``worker``: the cache key holds them. ``thread`` is the index of the thread in the team (0 when run
on the calling thread), for scratch memory. Which thread gets which items is not fixed; a worker
whose result must not depend on it computes an item from that item alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from numba import types

# Sums may be reordered and a*b+c fused; NaN, infinities and division keep their meaning.
SAFE_FASTMATH = frozenset({"reassoc", "contract", "nsz"})
_OPTIONS: dict[str, Any] = {"fastmath": set(SAFE_FASTMATH), "error_model": "numpy"}

# Newer numba is partly annotated, older not at all: both read the same as Any.
_cfunc: Any = numba.cfunc
_numba_config: Any = numba.config

_WORKER_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


@dataclass(frozen=True, slots=True)
class CompiledWorker:
    """A worker in machine code. ``function`` keeps the code alive."""

    name: str
    address: int
    function: Any

    @property
    def symbol(self) -> str:
        """Module and function, dotted."""
        return f"{self.function._pyfunc.__module__}.{self.name.rpartition('.')[2]}"

    def object_code(self) -> bytes:
        """The ELF object that was linked; b"" where numba has not kept it."""
        try:
            return bytes(self.function._library._get_compiled_object())
        except (RuntimeError, ValueError):  # what it raises for code that came from its cache
            return _cached_object(self.function)

    def assembly(self) -> str:
        """The machine code as text, to check which instructions the leaf contains.

        Compiles again: code loaded from the cache cannot be shown.
        """
        fresh = _cfunc(_WORKER_SIGNATURE, **_OPTIONS)(self.function._pyfunc)
        return str(fresh._library.get_asm_str())


def _cached_object(function: Any) -> bytes:
    """The object of a function in numba's cache on disk, which is what was loaded from there."""
    cache = function._cache
    if not hasattr(cache, "_cache_file"):  # compiled without a cache
        return b""
    target: Any = numba.core.registry.cpu_target
    codegen = target.target_context.codegen()
    found = cache._cache_file.load(cache._index_key(function._sig, codegen))
    if found is None:
        return b""
    _, kind, data = found[0]
    return bytes(data[0]) if kind == "object" else b""


def compile_worker(
    function: Callable[[int, int, int, int], None], *, cache: bool = True
) -> CompiledWorker:
    """Compile ``function(arguments, begin, end, thread)`` for this CPU.

    The code is cached on disk, keyed by the source, the closure's constants, the CPU's name and
    its features.

    Raises:
        numba.core.errors.NumbaError: the function is not in numba's nopython subset.
        OSError: no cache directory can be written.
    """
    with _cache_directory():
        compiled = _cfunc(_WORKER_SIGNATURE, cache=cache, **_OPTIONS)(function)
    return CompiledWorker(function.__qualname__, int(compiled.address), compiled)


@functools.cache
def codegen_features() -> str:
    """LLVM's features of the CPU that code is compiled for, as "+avx2,-avx512f,...".

    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES change it (both are needed to compile for a smaller CPU).
    """
    target: Any = numba.core.registry.cpu_target
    return str(target.target_context.codegen().magic_tuple()[2])


def worker_helper(function: Callable[..., Any]) -> Any:
    """A function that workers of the same file may call; compiled with the first that does."""
    return numba.njit(error_model="numpy")(function)


def compile_runner(function: Callable[[int], None]) -> CompiledWorker:
    """Compile ``function(address)``, which calls workers, for this CPU. Errors as above."""
    with _cache_directory():
        compiled = _cfunc(types.void(types.int64), cache=True, error_model="numpy")(function)
    return CompiledWorker(function.__qualname__, int(compiled.address), compiled)


def cache_directory() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, else the user's cache directory.

    A digest of the shared kernel sources is part of the path, because numba looks only at the
    file of the kernel itself when it decides whether cached code is stale.

    Raises:
        OSError: the directory cannot be made or written.
    """
    configured = os.environ.get("NUMBA_CACHE_DIR")
    if configured:
        root = Path(configured)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halstack"
    directory = root / f"kernels-{_shared_source_digest()}"
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise PermissionError(
            f"compiled kernels cannot be cached: {directory} is not writable; "
            "set NUMBA_CACHE_DIR to a directory that is"
        )
    return directory


@functools.cache
def _shared_source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def _cache_directory() -> Iterator[None]:
    """Point numba at our cache while we compile, and only then: the setting is the process'."""
    before = _numba_config.CACHE_DIR
    _numba_config.CACHE_DIR = str(cache_directory())
    try:
        yield
    finally:
        _numba_config.CACHE_DIR = before
