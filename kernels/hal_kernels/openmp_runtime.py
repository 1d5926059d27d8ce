"""The OpenMP runtime whose threads torch uses, found by the dynamic linker's own order."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ParallelRuntime:
    """Entry points of the OpenMP runtime that torch uses."""

    parallel_address: int
    thread_num_address: int
    barrier_address: int


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
                barrier_address=_address_of(library.GOMP_barrier),
            )
        except (OSError, AttributeError) as error:
            missing.append(str(error))
            continue
        return runtime, f"OpenMP of {name or 'the process'}"
    return None, "no OpenMP runtime with GOMP_parallel: " + "; ".join(missing)


def parallel_call(runtime: ParallelRuntime) -> Callable[[object, object, int, object], None]:
    """GOMP_parallel(void (*function)(void *), void *data, unsigned num_threads, unsigned flags).

    The call releases the interpreter's lock; a launch on the calling thread keeps it, because
    getting it back from a busy thread can cost more than the small kernel.
    """
    prototype = ctypes.CFUNCTYPE(
        None, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint32
    )
    call: Callable[[object, object, int, object], None] = prototype(runtime.parallel_address)
    return call


def _address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    if address is None:
        raise OSError(f"{function} has no address")
    return address
