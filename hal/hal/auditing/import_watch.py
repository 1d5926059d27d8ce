"""Imports while a program is observed: when torch arrives, and which kernel libraries did not.

A finder before all others: it finds nothing itself, but sees what is asked for. A library that is
only looked for (`importlib.util.find_spec`) has not failed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any, Final

KERNEL_LIBRARIES: Final = frozenset(
    {
        "flash_attn",
        "flash_attn_interface",
        "flash_attn_3",
        "flash_mla",
        "flashinfer",
        "xformers",
        "apex",
        "bitsandbytes",
        "transformer_engine",
        "mamba_ssm",
        "causal_conv1d",
        "fla",
        "sageattention",
        "sgl_kernel",
        "vllm",
        "vllm_flash_attn",
        "deep_gemm",
        "deep_ep",
        "aiter",
        "liger_kernel",
        "natten",
        "torchao",
        "gptqmodel",
        "auto_gptq",
        "awq",
        "autoawq_kernels",
        "exllamav2",
        "exllama_kernels",
        "torch_scatter",
        "torch_sparse",
        "triton",
        "kernels",
        "flex_prefill",
        "block_sparse_attn",
        "cutlass",
        "quack",
        "ring_flash_attn",
        "intel_extension_for_pytorch",
        "torch_npu",
        "torch_mlu",
        "torch_musa",
        "onnxruntime",
        "unsloth",
    }
)


class FailedImport:
    """An import of a kernel library that raised. frame: of the importing code, of the program."""

    __slots__ = ("error", "frame", "name")

    def __init__(self, name: str, error: BaseException, frame: FrameType | None) -> None:
        self.name = name
        self.error = error
        self.frame = frame


class ImportWatch(importlib.abc.MetaPathFinder):
    """Put before all other finders while an audit runs."""

    def __init__(
        self, on_module: dict[str, Callable[[], None]], on_failure: Callable[[FailedImport], None]
    ) -> None:
        """on_module: called once after a module of that name was executed."""
        self._on_module = on_module
        self._on_failure = on_failure
        self._local = threading.local()

    def install(self) -> None:
        """From here on imports are watched."""
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """The finders as they were."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None where nobody has to be told; else the others' answer with a loader that tells."""
        is_library = fullname in KERNEL_LIBRARIES
        if not is_library and fullname not in self._on_module:
            return None
        if getattr(self._local, "is_asking", False):
            return None
        spec: importlib.machinery.ModuleSpec | None = self._ask_others(fullname, path, target)
        frame = _importer()
        if spec is None:
            if is_library and frame is not None:
                error = ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
                self._on_failure(FailedImport(fullname, error, frame))
            return None
        if spec.loader is not None and frame is not None:
            spec.loader = _Telling(spec.loader, fullname, self, frame if is_library else None)
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> Any:
        self._local.is_asking = True
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = None if finder is self or find is None else find(name, path, target)
                if spec is not None:
                    return spec
            return None
        finally:
            self._local.is_asking = False

    def executed(self, name: str) -> None:
        """A module that was waited for is there."""
        told = self._on_module.get(name)
        if told is not None:
            told()

    def failed(self, failure: FailedImport) -> None:
        """A kernel library raised while it was imported."""
        self._on_failure(failure)


class _Telling(importlib.abc.Loader):
    """A loader that tells how it went. The module keeps its own loader."""

    def __init__(self, loader: Any, name: str, watch: ImportWatch, frame: FrameType | None) -> None:
        self._loader = loader
        self._name = name
        self._watch = watch
        self._frame = frame

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does; then tells."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        frame, self._frame = self._frame, None
        try:
            self._loader.exec_module(module)
        except Exception as error:
            if frame is not None:
                self._watch.failed(FailedImport(self._name, error, frame))
            raise
        self._watch.executed(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _importer() -> FrameType | None:
    """The frame with the import statement; None if somebody only looks for the module."""
    frame: FrameType | None = sys._getframe(2)
    is_import = False
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        is_import = is_import or frame.f_code.co_name == "_find_and_load"
        frame = frame.f_back
    return frame if is_import else None
