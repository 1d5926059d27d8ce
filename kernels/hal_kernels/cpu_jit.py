"""Compiles CPU kernels with numba and runs them on torch's own OpenMP threads.

Why not numba's ``parallel=True``: it brings a second thread pool, and torch's threads spin after
each torch op; two pools on the same cores cost more than the kernel itself. Here a kernel is a
plain C function over a range of work items, and ``GOMP_parallel`` of the OpenMP runtime that torch
itself is linked to runs it, so there is one pool per calling thread and ``torch.set_num_threads``
holds for both.

A kernel ("worker") is written as

    def worker(arguments, begin, end, thread):   # four int64
        args = pointer_int64(arguments)
        x = pointer_float32(args[0])
        for item in range(begin, end): ...

``arguments`` is the address of the int64 values given to the launch: addresses and numbers. Sizes
that the inner loops should know (head_dim, ...) are closure constants of ``worker``: the cache
key holds them. ``thread`` is the index of the thread in the team (0 when run on the calling
thread), for scratch memory. Which thread gets which items is not fixed; a worker whose result
must not depend on it computes an item from that item alone.

    compiled = compile_worker(worker)
    launch = bind_worker(compiled, num_arguments=3)
    launch(num_items, grain, x.data_ptr(), y.data_ptr(), num_rows)

A launch holds its own argument memory: it is cheap (about 1 µs) and must not be entered by two
threads at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numba
import torch
from numba import types

from hal.loaded_code import LoadedCode, note_loaded_code
from hal_kernels.cpu_intrinsics import (
    atomic_fetch_add,
    call_int,
    call_parallel,
    call_worker,
    pointer_int64,
)

# Sums may be reordered and a*b+c fused; NaN, infinities and division keep their meaning.
SAFE_FASTMATH = frozenset({"reassoc", "contract", "nsz"})
_OPTIONS: dict[str, Any] = {"fastmath": set(SAFE_FASTMATH), "error_model": "numpy"}

# Newer numba is partly annotated, older not at all: both read the same as Any.
_cfunc: Any = numba.cfunc
_numba_config: Any = numba.config

_WORKER_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)

# Words of a launch's memory. The last three and the worker's own arguments, which follow, are
# written by every launch; the worker's constants come last. Entries are launches that had items,
# counted by the code that calls the worker: an audit reads them.
_WORKER, _ARGUMENTS, _THREAD_NUM, _ENTRIES, _NEXT_ITEM, _NUM_ITEMS, _GRAIN = range(7)
_HEADER_WORDS = 7

# Words of a launch of two workers, before the two workers' own: see `_run_stages`.
_PARALLEL, _RUN_TEAM, _NUM_THREADS, _STAGES = range(4)
_NUM_STAGES = 2
_STAGES_WORDS = _STAGES + _NUM_STAGES


class Launch(Protocol):
    """Runs a bound worker over ``num_items`` items.

    With ``num_items <= grain`` it runs on the calling thread. Otherwise the threads take ``grain``
    items at a time until none is left.
    """

    def __call__(self, num_items: int, grain: int, *arguments: int) -> None: ...


class StagedLaunch(Protocol):
    """Runs one bound worker, then another, each as a `Launch` does.

    Both tuples: (num_items, grain, *arguments). One call costs less than two launches.
    """

    def __call__(self, first: tuple[int, ...], second: tuple[int, ...]) -> None: ...


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


@dataclass(frozen=True, slots=True)
class ParallelRuntime:
    """Entry points of the OpenMP runtime that torch uses."""

    parallel_address: int
    thread_num_address: int


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


def bind_worker(
    worker: CompiledWorker, num_arguments: int, constants: tuple[int | torch.Tensor, ...] = ()
) -> Launch:
    """Give ``worker`` its argument memory and return the call.

    The worker sees the launch's ``num_arguments`` arguments first, then ``constants``: numbers,
    addresses whose memory the caller keeps alive, and tensors, seen as the address of their data
    and kept alive by the launch.
    """
    words = (ctypes.c_int64 * (_HEADER_WORDS + num_arguments + len(constants)))()
    header_address = ctypes.addressof(words)
    words[_WORKER] = worker.address
    words[_ARGUMENTS] = header_address + 8 * _HEADER_WORDS
    words[_HEADER_WORDS + num_arguments :] = [
        item.data_ptr() if isinstance(item, torch.Tensor) else item for item in constants
    ]
    _note(worker, words, _ENTRIES)
    held = (worker, constants)  # as a default argument, for as long as the launch lives
    pack = struct.Struct(f"={3 + num_arguments}q").pack_into
    pack_offset = 8 * _NEXT_ITEM
    # A ctypes object as argument saves the conversion that a Python int costs in each call.
    header = ctypes.c_int64(header_address)
    run_here = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_run_here().address)
    runtime, _ = parallel_runtime()

    if runtime is None:

        def launch_here(num_items: int, grain: int, *arguments: int, _held: Any = held) -> None:
            pack(words, pack_offset, 0, num_items, grain, *arguments)
            run_here(header)

        return launch_here

    words[_THREAD_NUM] = runtime.thread_num_address
    parallel = _parallel_call(runtime)
    run_team = ctypes.c_int64(_run_team().address)
    no_flags = ctypes.c_uint32(0)
    get_num_threads = torch.get_num_threads

    def launch(num_items: int, grain: int, *arguments: int, _held: Any = held) -> None:
        pack(words, pack_offset, 0, num_items, grain, *arguments)
        if num_items <= grain or (num_threads := get_num_threads()) == 1:
            run_here(header)
        else:
            parallel(run_team, header, num_threads, no_flags)

    return launch


def _note(worker: CompiledWorker, words: Any, index: int) -> None:
    """Tells an audit, if one listens, of the worker and of the word that counts its entries."""
    note_loaded_code(
        LoadedCode(
            symbol=worker.symbol,
            address=worker.address,
            entries=lambda: int(words[index]),
            object_code=worker.object_code,
        )
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker of a `StagedLaunch`; the fields are the arguments of `bind_worker`."""

    worker: CompiledWorker
    num_arguments: int
    constants: tuple[int | torch.Tensor, ...] = ()

    @property
    def num_words(self) -> int:
        return _HEADER_WORDS + self.num_arguments + len(self.constants)


def bind_stages(first: Stage, second: Stage) -> StagedLaunch:
    """Give two workers their argument memory and return the call that runs one after the other."""
    runtime, _ = parallel_runtime()
    start_second = _STAGES_WORDS + first.num_words
    words = (ctypes.c_int64 * (start_second + second.num_words))()
    address = ctypes.addressof(words)
    if runtime is not None:
        words[_PARALLEL], words[_RUN_TEAM] = runtime.parallel_address, _run_team().address
    packs = []
    for index, (stage, start) in enumerate(((first, _STAGES_WORDS), (second, start_second))):
        words[_STAGES + index] = address + 8 * start
        words[start + _WORKER] = stage.worker.address
        words[start + _ARGUMENTS] = address + 8 * (start + _HEADER_WORDS)
        words[start + _THREAD_NUM] = 0 if runtime is None else runtime.thread_num_address
        words[start + _HEADER_WORDS + stage.num_arguments : start + stage.num_words] = [
            item.data_ptr() if isinstance(item, torch.Tensor) else item for item in stage.constants
        ]
        packs.append(struct.Struct(f"={3 + stage.num_arguments}q").pack_into)
        _note(stage.worker, words, start + _ENTRIES)
    held = (first, second)  # as a default argument, for as long as the launch lives
    pack_first, pack_second = packs
    first_offset, second_offset = 8 * (_STAGES_WORDS + _NEXT_ITEM), 8 * (start_second + _NEXT_ITEM)
    header = ctypes.c_int64(address)
    run_stages = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_run_stages().address)
    get_num_threads = torch.get_num_threads if runtime is not None else lambda: 1

    def launch(first: tuple[int, ...], second: tuple[int, ...], _held: Any = held) -> None:
        pack_first(words, first_offset, 0, *first)
        pack_second(words, second_offset, 0, *second)
        words[_NUM_THREADS] = get_num_threads()
        run_stages(header)

    return launch


@functools.cache
def parallel_runtime() -> tuple[ParallelRuntime | None, str]:
    """The OpenMP runtime of this torch build and where it was found, or None and the reason.

    Without one, launches run on the calling thread only; a candidate that needs threads to keep
    its tier must refuse with the reason given here.
    """
    info = torch.__config__.parallel_info()
    if "ATen parallel backend: OpenMP" not in info:
        backend = info.partition("ATen parallel backend:")[2].strip().partition("\n")[0]
        return None, f"torch runs its threads with {backend or 'an unknown backend'}, not OpenMP"
    # The order of the dynamic linker: global symbols first (a preloaded runtime wins for torch
    # too), then what libtorch_cpu itself is linked to. libomp and libiomp5 export the GOMP_
    # entry points as well.
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    missing: list[str] = []
    for name in (None, str(torch_library)):
        try:
            library = ctypes.CDLL(name)
            runtime = ParallelRuntime(
                parallel_address=_address_of(library.GOMP_parallel),
                thread_num_address=_address_of(library.omp_get_thread_num),
            )
        except (OSError, AttributeError) as error:
            missing.append(str(error))
            continue
        return runtime, f"OpenMP of {name or 'the process'}"
    return None, "no OpenMP runtime with GOMP_parallel: " + "; ".join(missing)


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


def _address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    if address is None:
        raise OSError(f"{function} has no address")
    return address


def _parallel_call(runtime: ParallelRuntime) -> Callable[[object, object, int, object], None]:
    """GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags).

    The call releases the interpreter's lock; a launch on the calling thread keeps it, because
    getting it back from a busy thread can cost more than the small kernel.
    """
    prototype = ctypes.CFUNCTYPE(
        None, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32
    )
    call: Callable[[object, object, int, object], None] = prototype(runtime.parallel_address)
    return call


@functools.cache
def _run_team() -> CompiledWorker:
    """What each thread of the team runs: take items, call the worker, until none is left."""

    def run_team(header_address: int) -> None:
        header = pointer_int64(header_address)
        thread = call_int(header[_THREAD_NUM])
        num_items = header[_NUM_ITEMS]
        grain = header[_GRAIN]
        while True:
            begin = atomic_fetch_add(header_address + 8 * _NEXT_ITEM, grain)
            if begin >= num_items:
                return
            if begin == 0:
                header[_ENTRIES] += 1
            end = min(begin + grain, num_items)
            call_worker(header[_WORKER], header[_ARGUMENTS], begin, end, thread)

    return _compile_runner(run_team)


@functools.cache
def _run_here() -> CompiledWorker:
    """Runs the worker over all items on the calling thread."""

    def run_here(header_address: int) -> None:
        header = pointer_int64(header_address)
        if header[_NUM_ITEMS] > 0:
            header[_ENTRIES] += 1
        call_worker(header[_WORKER], header[_ARGUMENTS], 0, header[_NUM_ITEMS], 0)

    return _compile_runner(run_here)


@functools.cache
def _run_stages() -> CompiledWorker:
    """Runs the workers of a staged launch one after the other, on the team where it pays."""

    def run_stages(address: int) -> None:
        words = pointer_int64(address)
        num_threads = words[_NUM_THREADS]
        for stage in range(_NUM_STAGES):
            header_address = words[_STAGES + stage]
            header = pointer_int64(header_address)
            num_items = header[_NUM_ITEMS]
            if num_items <= header[_GRAIN] or num_threads == 1:
                if num_items > 0:
                    header[_ENTRIES] += 1
                call_worker(header[_WORKER], header[_ARGUMENTS], 0, num_items, 0)
            else:
                call_parallel(words[_PARALLEL], words[_RUN_TEAM], header_address, num_threads)

    return _compile_runner(run_stages)


def _compile_runner(function: Callable[[int], None]) -> CompiledWorker:
    with _cache_directory():
        compiled = _cfunc(types.void(types.int64), cache=True, error_model="numpy")(function)
    return CompiledWorker(function.__qualname__, int(compiled.address), compiled)
