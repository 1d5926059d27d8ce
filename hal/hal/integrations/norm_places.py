"""Norms of a model: which modules are one that an op means, found by what they compute.

A module's name says little: a weight may be w or 1 + w, an eps may have three names. So a module
that looks like a norm is asked for a few random rows, and is one of ours only if a formula in
float64 has the same results; of every other one the reason is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hal.binding import BoundOp, BoundOps
from hal.errors import RoutingError
from hal.integrations.call_places import (
    Site,
    WeightState,
    dtype_name,
    refuse_gradients,
    run_bound,
    site_of,
    token_range,
    widest_of,
)
from hal.ops.layer_norm import LayerNormRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest

RMS, RMS_PLUS_ONE, LAYER = "rms", "rms of 1 + weight", "layer"
_EPS_NAMES: Final = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_epsilon")
# Largest difference from the formula, as a share of the largest value: a module rounds more often.
_TOLERANCES: Final = {"float64": 1e-10, "float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3}
_SEED: Final = 1307


@dataclass(slots=True, kw_only=True, eq=False)
class NormPlace:
    """A norm over the last dimension. form: RMS, RMS_PLUS_ONE or LAYER. refusal: why the rehearsal
    found it to be none of ours after all."""

    name: str
    form: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    widest: int = 1
    refusal: str = ""
    _op: BoundOp | None = field(default=None, init=False)
    _state: WeightState | None = field(default=None, init=False)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
        """A call of the rehearsal."""
        refusal = self._refusal_of(args, kwargs)
        if refusal:
            self.refusal = refusal
        else:
            rows = args[0].numel() // max(1, args[0].shape[-1])
            self.widest = widest_of(rows, tokens, self.widest)

    def _refusal_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call is none of a norm's; "" where it is one."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.shape[-1:] != self.weight.shape:
            return "it is called with more than one tensor of its width"
        if x.dtype != self.weight.dtype:
            weight, found = dtype_name(self.weight.dtype), dtype_name(x.dtype)
            return f"its weight is {weight}, what it is called with {found}"
        return ""

    def sites(self, max_tokens: int) -> Iterator[Site]:
        dtype, tokens = dtype_name(self.weight.dtype), token_range(max_tokens, self.widest)
        width = self.weight.shape[0]
        request: OpRequest
        if self.form == LAYER:
            has_bias = self.bias is not None
            request = LayerNormRequest(
                hidden_size=width, has_bias=has_bias, dtype=dtype, tokens=tokens
            )
        else:
            request = RmsNormRequest(hidden_size=width, dtype=dtype, tokens=tokens)
        yield site_of(self.name, request)

    def bind(self, ops: BoundOps) -> None:
        weight = self.weight.detach()
        if self.form == LAYER:
            bias = None if self.bias is None else self.bias.detach()
            self._op = ops.bind(self.name, weight=weight, eps=self.eps, bias=bias)
        else:
            scale = weight + 1 if self.form == RMS_PLUS_ONE else weight
            self._op = ops.bind(self.name, weight=scale, eps=self.eps)
        self._state = WeightState.of(self.weight)

    def call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., H] -> [..., H]. Raises RoutingError for another call than the rehearsal's."""
        if self._op is None or self._state is None:
            raise RoutingError(self.name, "a call after routing", "nothing is bound", "report it")
        found = self._refusal_of(args, kwargs)
        if found:
            raise RoutingError(
                self.name, "a call as in the rehearsal", found, "route it with such example_inputs"
            )
        x: torch.Tensor = args[0]
        self._state.check(self.name, self.weight)
        refuse_gradients(self.name, x, self.weight)
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return torch.empty_like(x)
        y: torch.Tensor = run_bound(self.name, self._op, len(rows), rows.contiguous())
        return y.view(x.shape)


def find_norm(name: str, module: torch.nn.Module) -> NormPlace | str | None:
    """The place of a module that computes one of our norms; of another module that looks like a
    norm the reason why it is none; None for what is no norm at all."""
    if "norm" not in type(module).__name__.lower() or next(module.children(), None) is not None:
        return None
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    if (
        weight is None
        or weight.dim() != 1
        or parameters
        or next(module.buffers(), None) is not None
    ):
        return "it has not just a weight of its width, and perhaps a bias"
    if len(inspect.signature(module.forward).parameters) != 1:
        return "its forward takes more than one tensor"
    choices = _eps_of(module)
    if not choices:
        return f"it has no eps by the name of {', '.join(_EPS_NAMES)}"
    if dtype_name(weight.dtype) not in _TOLERANCES:
        return f"its weight is {dtype_name(weight.dtype)}"
    for eps in choices:
        form = _form_of(module, weight, bias, eps)
        if form == RMS_PLUS_ONE and not _holds_one_more(weight):
            return f"1 + its weight is no {dtype_name(weight.dtype)}, and would be rounded"
        if form is not None:
            return NormPlace(name=name, form=form, weight=weight, bias=bias, eps=eps)
    return "it computes neither a root-mean-square norm nor a layer norm of its width"


def _holds_one_more(weight: torch.Tensor) -> bool:
    """Whether 1 + weight is exact in the weight's own type; float32 rounds it as the model does."""
    if weight.dtype in (torch.float32, torch.float64):
        return True
    values = weight.detach()
    return torch.equal((values + 1).double(), values.double() + 1)


def _eps_of(module: torch.nn.Module) -> tuple[float, ...]:
    """What its eps can be: torch's own default is of the data's type or of the arithmetic's."""
    for name in _EPS_NAMES:
        if name in module.__dict__:
            found = module.__dict__[name]
            if found is None and type(module) is torch.nn.RMSNorm:
                return tuple(torch.finfo(d).eps for d in (module.weight.dtype, torch.float32))
            return (float(found),) if isinstance(found, int | float) else ()
    return ()


def _form_of(
    module: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> str | None:
    """The only formula whose results the module has, for rows of its scale and of eps's."""
    generator = torch.Generator().manual_seed(_SEED)
    draw = torch.randn(2, 3, len(weight), generator=generator, dtype=torch.float64)
    # Rows off zero tell a layer norm, small ones what eps is.
    rows = [(draw + 0.5) * scale for scale in (1.0, max(eps, 1e-12) ** 0.5)]
    forms = {LAYER: _layer_norm} if bias is not None else _FORMS
    fits = [name for name, formula in forms.items() if _fits(module, formula, rows, eps)]
    return fits[0] if len(fits) == 1 else None


def _fits(
    module: torch.nn.Module, formula: Callable[..., torch.Tensor], rows: list[torch.Tensor],
    eps: float,
) -> bool:  # fmt: skip
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    for drawn in rows:
        x = drawn.to(weight.device, weight.dtype)
        with torch.no_grad():
            got = module.forward(x)
            want = formula(x.double(), weight.double(), bias, eps)
        if not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (x.shape, x.dtype):
            return False
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-300)
        if not float(error) <= _TOLERANCES[dtype_name(weight.dtype)]:
            return False
    return True


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rms_norm_plus_one(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _rms_norm(x, 1 + weight, bias, eps)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    y = _rms_norm(x - x.mean(-1, keepdim=True), weight, None, eps)
    return y if bias is None else y + bias.double()


_FORMS: Final[dict[str, Callable[..., torch.Tensor]]] = {
    RMS: _rms_norm,
    RMS_PLUS_ONE: _rms_norm_plus_one,
    LAYER: _layer_norm,
}


def noting_norm(
    module: torch.nn.Module, place: NormPlace, tokens: Callable[[], int]
) -> Callable[..., Any]:
    """A forward that notes its calls and computes as before. tokens: of the model's input now."""
    forward = type(module).forward

    def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
        place.note(args, kwargs, tokens())
        return forward(module, *args, **kwargs)

    return noted


def calling_norm(place: NormPlace) -> Callable[..., torch.Tensor]:
    """A forward that calls the place."""

    def called(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if module.training:
            raise RoutingError(
                place.name, "a model in evaluation mode", "training mode", "model.eval(), or undo()"
            )
        return place.call(*args, **kwargs)

    return called


class Norms:
    """The norms of one model. left: of every other norm, by name, why it stays as it is."""

    def __init__(self) -> None:
        self.places: dict[torch.nn.Module, NormPlace] = {}
        self.left: dict[str, str] = {}

    def find(self, name: str, module: torch.nn.Module) -> None:
        """Notes a module if it is a norm."""
        found = find_norm(name, module)
        if isinstance(found, NormPlace):
            self.places[module] = found
        elif found is not None:
            self.left[f"{name} ({type(module).__name__})"] = found

    def drop_refused(self) -> None:
        """After a rehearsal: what was called as no norm of ours stays as it is."""
        for module, place in list(self.places.items()):
            if place.refusal:
                self.left[f"{place.name} ({type(module).__name__})"] = place.refusal
                del self.places[module]

    def notes(self) -> Iterator[str]:
        """What of the norms is not routed, each reason once, for the plan."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"norms that are not routed: {', '.join(names[:3])}{more}: {reason}"
