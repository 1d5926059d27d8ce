"""Which models are not routed, which calls of a routed one are refused: each with its reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from hal.device import DeviceSpec
from hal.errors import RoutingError
from hal.integrations.swapped_modules import RoutedModule
from hal.plugins.registry import BackendRegistry

# Distributions whose modules hold weights that are no plain float matrices: by the root of the
# module's own package.
_QUANTISED = (
    "bitsandbytes",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "quanto",
    "optimum",
    "torchao",
    "compressed_tensors",
    "aqlm",
    "eetq",
    "vptq",
    "fbgemm_gpu",
    "fp_quant",
)
_QUANTISED_CLASSES = ("FP8Linear", "FP8Experts", "BitLinear", "Mxfp4GptOssExperts", "HiggsLinear")


def check_model(model: Any) -> None:
    """Raises RoutingError for a model that cannot be routed, before anything of it is changed."""
    who = f"routing of {type(model).__name__}"
    if importlib.util.find_spec("transformers") is None:
        raise RoutingError(who, "transformers", "not installed", "pip install transformers")
    from transformers import PreTrainedModel

    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or model.__dict__.get(
        "_compiled_call_impl"
    ):
        raise RoutingError(
            who,
            "a model that is not compiled",
            "torch.compile: its graphs hold the calls that routing would replace",
            "route the model itself; do not compile a routed one, its counters need Python",
        )
    if not isinstance(model, PreTrainedModel):
        raise RoutingError(
            who,
            "a transformers PreTrainedModel",
            f"{type(model).__module__}.{type(model).__qualname__}",
            "pass the model itself; of a PEFT model, merge_and_unload() gives it",
        )
    if model.training:
        raise RoutingError(
            who,
            "a model in evaluation mode: the kernels have no backward pass",
            "training mode",
            "call model.eval() first",
        )
    for name, module in model.named_modules():
        _check_module(who, name, module)
    _check_tensors(who, model)


def _check_module(who: str, name: str, module: torch.nn.Module) -> None:
    kind = type(module)
    where = f"{name or 'the model'} ({kind.__module__}.{kind.__qualname__})"
    if isinstance(module, RoutedModule):
        raise RoutingError(who, "a model that is not routed yet", where, "undo() the first routing")
    root = kind.__module__.partition(".")[0]
    if root in _QUANTISED or kind.__qualname__ in _QUANTISED_CLASSES:
        raise RoutingError(
            who,
            "modules with float weights",
            f"{where}: quantised, its product is its own",
            "load the model unquantised; quantised weights are served by the engine",
        )
    if root == "peft" or hasattr(module, "lora_A"):
        raise RoutingError(
            who,
            "modules of the model alone",
            f"{where}: an adapter that can be switched while it runs",
            "merge it: model.merge_and_unload()",
        )
    if hasattr(module, "_hf_hook") or "forward" in module.__dict__:
        raise RoutingError(
            who,
            "modules whose forward is their class's",
            f"{where}: a forward of its own (offloading, a device map, a kernel hub)",
            "load the model on one device, without hooks around its modules",
        )
    if module.__dict__.get("_compiled_call_impl") is not None:
        raise RoutingError(
            who, "modules that are not compiled", where, "route the model without torch.compile"
        )


def _check_tensors(who: str, model: Any) -> None:
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise RoutingError(
            who,
            "all parameters on one device",
            ", ".join(sorted(devices)) or "no parameters",
            "load the whole model on one device",
        )
    odd = sorted({str(p.dtype) for p in model.parameters() if not p.is_floating_point()})
    if odd:
        raise RoutingError(
            who,
            "parameters of float dtypes",
            ", ".join(odd),
            "load the model unquantised; quantised weights are served by the engine",
        )


def hiding_modules(model: torch.nn.Module) -> list[str]:
    """Torch's own modules that call products where nothing can lead them elsewhere, in a line."""
    kinds = torch.nn.MultiheadAttention | torch.nn.RNNBase
    hiding = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if not hiding:
        return []
    names = list(hiding)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    words = ", ".join(sorted({type(module).__name__ for module in hiding.values()}))
    return [
        f"{', '.join(names[:3])}{more} ({words}): torch calls its products inside one function "
        "of its own, where nothing can be led elsewhere"
    ]


def device_of(model: Any, device: str | None, registry: BackendRegistry) -> DeviceSpec:
    """The device that the model's parameters are on. device: its id, where there are several.

    Raises RoutingError if nothing that was detected is that device, or the id names another one.
    """
    placed = str(next(model.parameters()).device)
    who = f"routing of {type(model).__name__} on {placed}"
    if device is not None:
        spec = registry.describe(device)
        if not _is_place_of(spec, placed):
            raise RoutingError(
                who,
                f"a model on {spec.torch_device} ({device})",
                placed,
                f"model.to({spec.torch_device!r}) first",
            )
        return spec
    found = [registry.describe(d.device_id) for d in registry.devices]
    found = [spec for spec in found if _is_place_of(spec, placed)]
    present = {spec.device_id for spec in found}
    found = [s for s in found if s.attributes.get("same_silicon_as") not in present]
    if len(found) != 1:
        raise RoutingError(
            who,
            "one detected device that torch knows by this name",
            ", ".join(spec.device_id for spec in found) or "none",
            "name it with device=; `hal doctor` shows what was detected",
        )
    return found[0]


def _is_place_of(spec: DeviceSpec, placed: str) -> bool:
    def full(name: str) -> str:
        return name if ":" in name or name == "cpu" else f"{name}:0"

    return full(spec.torch_device) == full(placed)


class CallCheck(RoutedModule):
    """A forward pre-hook of the whole model, with keyword arguments: raises RoutingError for calls
    that a routed model does not take."""

    def __init__(
        self, model: Any, device_type: str, check_implementation: Callable[[], None]
    ) -> None:
        self._who = f"call of routed {type(model).__name__}"
        self._device_type = device_type
        self._check_implementation = check_implementation

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._refuse(
                "a call that is not compiled: its counters need Python",
                "torch.compile",
                "call it eagerly; generate(..., disable_compile=True) for static caches",
            )
        if module.training:
            self._refuse("evaluation mode", "training mode", "model.eval(), or undo()")
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(module.config, "output_attentions", False)):
            self._refuse(
                "no output_attentions: fused attention never has the weights",
                "output_attentions=True",
                "undo() to look at attention weights",
            )
        if torch.is_autocast_enabled(self._device_type):
            self._refuse(
                "the dtype that was planned",
                f"autocast to {torch.get_autocast_dtype(self._device_type)}",
                "convert the model and route it again",
            )
        self._check_implementation()

    def _refuse(self, required: str, found: str, remedy: str) -> NoReturn:
        raise RoutingError(self._who, required, found, remedy)
