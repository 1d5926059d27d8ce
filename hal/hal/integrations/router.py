"""Routes one model: finds its calls, plans them, leads them to bound ops, and proves it.

What the shapes of modules say is planned first; a rehearsal of the model as it is finds the rest; a
second one, routed and watched, must have the same results and nothing outside a bound op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from hal.binding import BoundOps, CallCount
from hal.device import DeviceSpec
from hal.dispatch_spy import DispatchSpy, EscapedCall
from hal.errors import RoutingError, WaiverError
from hal.integrations import attention_interface
from hal.integrations.allowances import Allowances
from hal.integrations.attention_places import AttentionCall, AttentionPlace, request_of
from hal.integrations.call_book import CallBook
from hal.integrations.call_places import (
    EmbeddingPlace,
    LinearPlace,
    Place,
    ProductPlace,
    dtype_name,
)
from hal.integrations.expert_places import ExpertsPlace, arranger, calling, is_experts
from hal.integrations.free_calls import CallMode
from hal.integrations.kernel_marks import KernelMarks
from hal.integrations.norm_places import Norms, calling_norm, noting_norm
from hal.integrations.plan_facts import model_summary, routed_versions
from hal.integrations.rehearsal import TOLERANCES, Step, largest_difference, run_steps
from hal.integrations.routing_refusals import CallCheck, hiding_modules
from hal.integrations.swapped_modules import guard, swap_forward, swap_place
from hal.ops.dense_attention import reference
from hal.plan import OpSite, Plan, group_sites
from hal.planner import PlanInputs, create_plan, plan_ops
from hal.plugins.registry import BackendRegistry
from hal.violations import violation_error
from hal.waivers import WaiverBook


class _Quiet(WaiverBook):
    """Waivers for a part of the call sites: those of the other part are not unused."""

    def check_after_planning(
        self, sites: Sequence[Any], compiled: Sequence[Any] = ()
    ) -> list[WaiverError]:
        return []


class Router:
    """The steps of routing one model. undo: takes back each change, last first."""

    def __init__(
        self,
        model: Any,
        device: DeviceSpec,
        registry: BackendRegistry,
        *,
        waivers: WaiverBook,
        use: Mapping[str, str],
        is_strict: bool,
        max_tokens: int,
        undo: ExitStack,
    ) -> None:
        self.model = model
        self.device = device
        self.marks = KernelMarks()
        self.book = CallBook(model)
        self._experts: dict[torch.nn.Module, ExpertsPlace] = {}
        self._norms = Norms()
        self._registry = registry
        self._waivers = waivers
        self._use = use
        self._is_strict = is_strict
        self._max_tokens = max_tokens
        self._undo = undo
        self._ops: BoundOps | None = None
        self._baseline: list[int] = []

    def find_own(self) -> None:
        """Modules that say what they call: plain linears and tables, experts, norms."""
        for module, name in self.book.names.items():
            if type(module) is torch.nn.Linear:
                self.book.own[module] = LinearPlace(
                    name=name, weight=module.weight, bias=module.bias
                )
            elif type(module) is torch.nn.Embedding and module.max_norm is None:
                self.book.own[module] = EmbeddingPlace(name=name, weight=module.weight)
            elif is_experts(module):
                self._experts[module] = ExpertsPlace(name=name, module=module)
            else:
                self._norms.find(name, module)

    def _module_places(self) -> list[Place]:
        """Places of modules that have one of their own, besides linears and tables."""
        return [*self._experts.values(), *self._norms.places.values()]

    def check_own(self) -> None:
        """A fast path that is lost by the shapes alone raises before any forward."""
        if not self._is_strict:
            return
        quiet = _Quiet(self._waivers.waivers, self._waivers.source)
        own = self._sites([*self.book.own.values(), *self._module_places()])
        labels = {site.request.label for site in own} | {site.request.op for site in own}
        use = {label: name for label, name in self._use.items() if label in labels}
        planned = plan_ops(self._inputs(own, quiet, use), is_strict=False)
        if planned.violations:
            raise violation_error(
                f"{self.device.name} ({self.device.device_id})", planned.violations
            )

    def rehearse(self, steps: Sequence[Step]) -> list[torch.Tensor | None]:
        """Runs the model as it is, notes every call, and gives what came out. The only change that
        stays is attention's implementation."""
        attention_interface.register()
        undo, self._check_implementation = attention_interface.set_implementation(self.model)
        with ExitStack() as rehearsing:
            # Without ours first: what comes out is transformers' own.
            undo()
            wanted = run_steps(self.model, steps)
            undo, self._check_implementation = attention_interface.set_implementation(self.model)
            self._undo.callback(undo)
            rehearsing.callback(attention_interface.claim(self.model, self._rehearse_attention))
            for module, place in self._experts.items():
                rehearsing.callback(swap_forward(module, self._noting(module, place)))
            for module, norm in self._norms.places.items():
                noted = noting_norm(module, norm, lambda: self.book.tokens)
                rehearsing.callback(swap_forward(module, noted))
            with CallMode(self.book.record, self.marks.is_inside):
                run_steps(self.model, steps, before=self._start)
        self.book.keep_needed_constants()
        self._norms.drop_refused()
        return wanted

    def _start(self, step: Step) -> None:
        self.book.tokens = step.tokens

    def _rehearse_attention(self, module: torch.nn.Module, call: AttentionCall) -> torch.Tensor:
        with self.marks.inside():
            call = self._with_seen_mask(call)
            self.book.note_attention(module, call)
            request = request_of(call)
            kernel = reference(request, scale=call.softmax_scale, sinks=call.sinks)
            return kernel(call.q, call.k, call.v, call.mask, call.lists)

    def _with_seen_mask(self, call: AttentionCall) -> AttentionCall:
        if call.mask is None:
            return call
        mask = self.book.masks.as_boolean(call.mask)
        return call if mask is call.mask else replace(call, mask=mask)

    def _noting(self, module: torch.nn.Module, place: ExpertsPlace) -> Callable[..., Any]:
        forward, arrange = type(module).forward, arranger(module)

        def noted(self_: Any, *args: Any, **kwargs: Any) -> Any:
            hidden, ids, _ = arrange(args, kwargs)
            place.note(hidden, ids, self.book.tokens)
            with self.marks.inside():
                return forward(self_, *args, **kwargs)

        return noted

    def plan(self) -> Plan:
        """The plan of every call that was found. Raises for a lost fast path that nobody waived."""
        places = [*self.book.places(), *self._module_places()]
        return create_plan(
            self._inputs(self._sites(places), self._waivers, self._use),
            model=model_summary(self.model),
            settings={"max_tokens": self._max_tokens, "use": dict(self._use)},
            kv_bytes_per_token=0,
            notes=self._notes(),
            versions=routed_versions(),
            is_strict=self._is_strict,
            on_decision=self._registry.decision_made,
        )

    def _sites(self, places: Sequence[Place]) -> list[OpSite]:
        return group_sites(site for place in places for site in place.sites(self._max_tokens))

    def _inputs(
        self, sites: Sequence[OpSite], waivers: WaiverBook, use: Mapping[str, str]
    ) -> PlanInputs:
        return PlanInputs(
            sites=sites,
            device=self.device,
            policy=self._registry.policy(self.device),
            candidates=self._registry.candidates,
            waivers=waivers,
            use=use,
        )

    def _notes(self) -> list[str]:
        notes = list(self._norms.notes())
        attention = [p for p in self.book.places() if isinstance(p, AttentionPlace)]
        if not attention:
            notes.append("no attention was recognised: neither an interface's nor torch's own")
        products = [p.name for p in self.book.free.values() if isinstance(p, ProductPlace)]
        if products:
            notes.append(
                f"{len(products)} products of two activations ({products[0]}, …) are planned as "
                "such: index scores, mixing, or attention that the model writes out"
            )
        return notes

    def bind(self, plan: Plan) -> None:
        """Binds every place, then leads the model's calls to them."""
        ops = BoundOps(plan, wrap=self.marks.wrap)
        for place in (*self.book.places(), *self._module_places()):
            place.bind(ops)
        for module, own in self.book.own.items():
            self._undo.callback(swap_place(module, own))
        for module, experts in self._experts.items():
            self._undo.callback(swap_forward(module, calling(experts, arranger(module))))
        for module, norm in self._norms.places.items():
            self._undo.callback(swap_forward(module, calling_norm(norm)))
        mode = CallMode(self.book.route, self.marks.is_inside)
        for module in self.book.guarded:
            self._undo.callback(guard(module, mode))
        self._undo.callback(attention_interface.claim(self.model, self._attend))
        hook = CallCheck(self.model, self._device_type(), self._check_implementation)
        handle = self.model.register_forward_pre_hook(hook, with_kwargs=True)
        self._undo.callback(handle.remove)
        self._ops = ops

    def _device_type(self) -> str:
        return str(next(self.model.parameters()).device.type)

    def _attend(self, module: torch.nn.Module, call: AttentionCall) -> torch.Tensor:
        place = self.book.attention.get(module)
        if place is None:
            raise RoutingError(
                f"attention of {self.book.names.get(module, type(module).__name__)}",
                "an attention that the rehearsal saw",
                "a new one",
                "route with example_inputs that lead to it",
            )
        return place.call(self._with_seen_mask(call))

    def check_routed(
        self,
        steps: Sequence[Step],
        wanted: Sequence[torch.Tensor | None],
        allowances: Allowances,
    ) -> None:
        """Rehearses the routed model: nothing outside bound ops, and the same results."""
        spy = DispatchSpy()
        got, escaped = self._run_spied(spy, steps)
        outside = [call for call in escaped if not allowances.covers(call)]
        if outside:
            raise self._escaped(outside)
        allowances.check_used()
        self._compare(steps, got, wanted)
        self._baseline = [row.calls for row in self._bound().counts()]

    def _run_spied(
        self, spy: DispatchSpy, steps: Sequence[Step]
    ) -> tuple[list[torch.Tensor | None], list[EscapedCall]]:
        self.marks.spy = spy
        try:
            with spy:
                got = run_steps(self.model, steps)
        finally:
            self.marks.spy = None
        return got, list(dict.fromkeys(spy.escaped))

    def spied(self, steps: Sequence[Step]) -> tuple[DispatchSpy, list[EscapedCall]]:
        """The steps under a spy, and what ran outside bound ops."""
        spy = DispatchSpy()
        _, escaped = self._run_spied(spy, steps)
        return spy, escaped

    def _escaped(self, outside: Sequence[EscapedCall]) -> RoutingError:
        lines = [f"{call.op} at {call.location}" for call in outside]
        reasons = [*hiding_modules(self.model), *dict.fromkeys(self.book.refused.values())]
        more = [f"… and {len(lines) - 12} more"] if len(lines) > 12 else []
        return RoutingError(
            f"routing of {type(self.model).__name__}",
            "every product, gather, attention and convolution through a bound op",
            "outside: " + "; ".join([*lines[:12], *more, *reasons[:6]]),
            "name what may stay outside in allow, as an op or as file.py:line",
        )

    def _compare(
        self,
        steps: Sequence[Step],
        got: Sequence[torch.Tensor | None],
        wanted: Sequence[torch.Tensor | None],
    ) -> None:
        worst = largest_difference(steps, got, wanted)
        dtype = dtype_name(next(self.model.parameters()).dtype)
        allowed = TOLERANCES.get(dtype, 1e-4)
        if not worst <= allowed:
            raise RoutingError(
                f"routing of {type(self.model).__name__}",
                f"results within {allowed:.0e} of the largest of the unrouted model ({dtype})",
                f"{worst:.1e}",
                "report it; a candidate may be left out meanwhile with use=",
            )

    def _bound(self) -> BoundOps:
        if self._ops is None:
            raise RoutingError("routed model", "a bound plan", "none", "report it")
        return self._ops

    def counts(self) -> list[CallCount]:
        """Calls since the rehearsal."""
        rows = list(self._bound().counts())
        return [
            replace(row, calls=row.calls - before)
            for row, before in zip(rows, self._baseline, strict=True)
        ]
