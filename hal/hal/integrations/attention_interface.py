"""transformers' attention interface: the implementation "hal", for every model that is routed.

A module that no routed model owns is an error, not an attention of torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from hal.errors import RoutingError
from hal.integrations.attention_places import AttentionCall

NAME: Final = "hal"
ADDED: Final = "hal_added"
"""The same for models whose code adds its masks: they must be floats."""

Attend = Callable[[torch.nn.Module, AttentionCall], torch.Tensor]

_OWNERS: weakref.WeakKeyDictionary[torch.nn.Module, Attend] = weakref.WeakKeyDictionary()
# What transformers passes along that changes an attention, and that no request can say.
_NOT_ROUTED = ("block_indices", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")


def register() -> None:
    """Makes the names known to transformers; again is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    AttentionInterface.register(NAME, _hal_attention)
    AttentionInterface.register(ADDED, _hal_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionMaskInterface.register(ADDED, eager_mask)


def claim(model: torch.nn.Module, attend: Attend) -> Callable[[], None]:
    """Attention of the model's modules goes to `attend`. Returns what undoes it."""
    modules = list(model.modules())
    for module in modules:
        _OWNERS[module] = attend

    def undo() -> None:
        for module in modules:
            if _OWNERS.get(module) is attend:
                del _OWNERS[module]

    return undo


def set_implementation(model: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """All configurations of the model name ours. Returns what undoes it, and what checks that it
    is still so (RoutingError otherwise)."""
    name = NAME if _takes_boolean_masks(model) else ADDED
    before = [(config, config._attn_implementation_internal) for config in _configurations(model)]
    for config, _ in before:
        config._attn_implementation_internal = name

    def undo() -> None:
        for config, value in before:
            config._attn_implementation_internal = value

    def check() -> None:
        for config, _ in before:
            if config._attn_implementation_internal != name:
                raise RoutingError(
                    f"attention of {type(model).__name__}",
                    f"the implementation {name!r}, which routing set",
                    repr(config._attn_implementation_internal),
                    "undo() before choosing another implementation",
                )

    return undo, check


def _takes_boolean_masks(model: Any) -> bool:
    return all(getattr(part, "_supports_sdpa", True) for part in model.modules())


def _configurations(model: Any) -> Iterator[Any]:
    """Every configuration that a module of the model reads, and those inside them, once.

    Those of classes that do not call the interface are left out: they may ask for the name of the
    implementation, and what they call instead is found in the rehearsal.
    """
    parts = [part for part in model.modules() if hasattr(part, "_can_set_attn_implementation")]
    fixed = [part for part in parts if not part._can_set_attn_implementation()]
    seen = {id(part.config) for part in fixed}
    waiting = [part.config for part in parts if part not in fixed]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation_internal"):
            continue
        seen.add(id(config))
        waiting += [getattr(config, key, None) for key in config.sub_configs]
        yield config


def _hal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    attend = _OWNERS.get(module)
    if attend is None:
        raise RoutingError(
            f"attention of {type(module).__name__}",
            "a module of a routed model",
            'a model that merely names the implementation "hal"',
            "route it with hal.integrations.transformers.route",
        )
    if dropout:
        raise _refused(module, "no dropout", f"dropout {dropout}", "model.eval()")
    for name in _NOT_ROUTED:
        if kwargs.get(name) is not None:
            raise _refused(module, f"no {name}", f"{name} given", "leave it out")
    call = _call_of(module, query, key, value, attention_mask, scaling, is_causal, kwargs)
    return attend(module, call).contiguous(), None


def _call_of(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
) -> AttentionCall:
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if mask is None and is_causal and 1 < queries < keys:
        # A static cache that is being filled: transformers leaves the mask out where the prompt is
        # at its beginning, so that what lies behind the prompt is empty.
        key, value = key[:, :, :queries], value[:, :, :queries]
    bias = kwargs.get("position_bias")
    if bias is not None:
        mask, is_causal = _with_bias(bias, mask, is_causal, query), False
    if mask is not None and mask.shape[-1] != key.shape[2]:
        mask = mask[..., : key.shape[2]]
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    return AttentionCall(
        q=query,
        k=key,
        v=value,
        mask=mask,
        scale=scaling,
        is_causal=is_causal,
        window=int(kwargs.get("sliding_window") or 0),
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=sinks,
        lists=kwargs.get("indices"),
    )


def _with_bias(
    bias: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor
) -> torch.Tensor:
    """The bias where a key is seen, "never" elsewhere: [B or 1, H, Q, S]."""
    never = torch.finfo(query.dtype).min
    if mask is None and is_causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, never) if mask.dtype == torch.bool else bias + mask


def _refused(module: torch.nn.Module, required: str, found: str, remedy: str) -> RoutingError:
    return RoutingError(f"attention of {type(module).__name__}", required, found, remedy)
