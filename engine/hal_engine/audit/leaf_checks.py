"""Whether calls end in the leaf that their implementation declares.

Leaves of one kind are alternatives; each kind that is declared must be shown on its own. What
shows them: torch's dispatcher (aten_op), entries into machine code that binding reported, or the
Python module whose functions run (symbol), and the bytes of that machine code (instruction).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hal.auditing.document import LeafCheck, LeafState
from hal.candidates import Leaf
from hal.dispatch_spy import is_tracked
from hal.loaded_code import LoadedCode
from hal_engine.audit.instructions import find_instruction


@dataclass(slots=True)
class CallEvidence:
    """What was seen inside one watched call. composites: torch ops that are made of others, which
    are in `ops`. modules: whose Python functions were entered, where that was looked at."""

    ops: Counter[str] = field(default_factory=Counter)
    composites: Counter[str] = field(default_factory=Counter)
    entered: Counter[str] = field(default_factory=Counter)
    modules: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Mismatch:
    """Calls that ended elsewhere: in what, how many, and the size of the first."""

    ended_in: str
    first: str
    calls: int = 0


class LeafTally:
    """Adds up the evidence of one call site and range."""

    def __init__(self, leaves: Sequence[Leaf], code: Sequence[LoadedCode]) -> None:
        self.leaves, self.code = tuple(leaves), tuple(code)
        self.torch_ops = [leaf.name for leaf in leaves if leaf.kind == "aten_op"]
        self.symbols = [leaf.name for leaf in leaves if leaf.kind == "symbol"]
        self.instructions = [leaf.name for leaf in leaves if leaf.kind == "instruction"]
        self.kernels = [leaf.name for leaf in leaves if leaf.kind == "kernel"]
        self._has_code = any(_is_within(c.symbol, self.symbols) for c in code)
        self.needs_python = bool(self.symbols) and not self._has_code
        self.calls = 0
        self.unseen_symbols = 0  # calls in which nothing could show the symbol
        self.seen: Counter[str] = Counter()
        self.mismatches: dict[str, Mismatch] = {}

    def add(self, evidence: CallEvidence, where: Callable[[], str]) -> None:
        """One watched call. where: its size, for the first that ends elsewhere."""
        self.calls += 1
        ops = [n for n in self.torch_ops if n in evidence.ops or n in evidence.composites]
        code = [name for name in evidence.entered if _is_within(name, self.symbols)]
        modules = [name for name in evidence.modules if _is_within(name, self.symbols)]
        for name in ops:
            self.seen[name] += evidence.ops[name] or evidence.composites[name]
        for name in code or evidence.entered:
            self.seen[name] += evidence.entered[name]
        for name in modules:
            self.seen[name] += 1
        if self._is_elsewhere(evidence, ops, code, modules):
            self._note(evidence, where)
        elif self.symbols and not code and not modules:
            self.unseen_symbols += 1

    def _is_elsewhere(
        self, evidence: CallEvidence, ops: list[str], code: list[str], modules: list[str]
    ) -> bool:
        if not self.leaves:
            return False
        if self.torch_ops and not ops:
            return True
        if self.symbols and self._has_code and not code:
            return True
        if self.code and not evidence.entered and not ops and not modules:
            return True
        # A module of Python functions may be made of torch ops; machine code may not become them.
        others = _products(evidence, self.torch_ops)
        return bool(others) and not ops and not modules

    def _note(self, evidence: CallEvidence, where: Callable[[], str]) -> None:
        others = _products(evidence, self.torch_ops) or sorted(evidence.ops)
        entered = sorted(evidence.entered)
        ended_in = ", ".join([*others, *entered]) or "nothing that can be seen"
        found = self.mismatches.get(ended_in)
        if found is None:
            found = self.mismatches[ended_in] = Mismatch(ended_in, where())
        found.calls += 1
        for name in others:
            self.seen[name] += evidence.ops[name]

    def copy(self) -> LeafTally:
        """One that further calls do not change."""
        other = LeafTally(self.leaves, self.code)
        other.calls, other.unseen_symbols = self.calls, self.unseen_symbols
        other.seen = self.seen.copy()
        other.mismatches = {name: replace(m) for name, m in self.mismatches.items()}
        return other

    def check(self) -> LeafCheck:
        """The verdict over all watched calls."""
        declared = tuple(f"{leaf.kind} {leaf.name}" for leaf in self.leaves)
        state, proof = self._verdict()
        return LeafCheck(declared=declared, seen=dict(self.seen), state=state, proof=proof)

    def _verdict(self) -> tuple[LeafState, str]:
        if not self.leaves:
            return "not-declared", "the implementation names no leaf"
        if self.mismatches:
            worst = max(self.mismatches.values(), key=lambda m: m.calls)
            return "other", (
                f"{worst.calls} of {self.calls} watched calls ended in {worst.ended_in}; "
                f"first with {worst.first}"
            )
        if not self.calls:
            return "not-observed", "no call was watched"
        proofs: list[str] = []
        doubts: list[str] = []
        if self.torch_ops:
            proofs.append("torch's dispatcher saw it in every watched call")
        if self.symbols:
            told = proofs if not self.unseen_symbols else doubts
            told.append(self._symbol_proof())
        if self.kernels:
            doubts.append("device kernels are not looked at here")
        if self.instructions:
            is_shown, text = self._instruction_proof()
            (proofs if is_shown else doubts).append(text)
        if doubts:
            return "not-observed", "; ".join(doubts + proofs)
        return "seen", "; ".join(proofs)

    def _symbol_proof(self) -> str:
        if self._has_code:
            total = sum(self.seen[c] for c in {code.symbol for code in self.code})
            return f"{total:,} entries into its machine code were counted"
        if self.unseen_symbols:
            return (
                f"nothing shows {' or '.join(self.symbols)}: binding reported no machine code, and "
                "no Python function of that name ran"
            )
        return "Python functions of that module ran in every watched call"

    def _instruction_proof(self) -> tuple[bool, str]:
        entered = {c.symbol: c for c in self.code if self.seen[c.symbol]}
        texts = []
        for name in self.instructions:
            found = find_instruction(name, entered.values())
            if not found.count:
                return False, f"{name}: {found.how}"
            texts.append(f"{found.count} × {found.mnemonic} {found.how}")
        return True, "; ".join(texts)


def _is_within(name: str, declared: Iterable[str]) -> bool:
    """Whether a dotted name is one of those declared, or below one."""
    return any(name == d or name.startswith(d + ".") for d in declared)


def _products(evidence: CallEvidence, declared: Sequence[str]) -> list[str]:
    return sorted(op for op in evidence.ops if is_tracked(op) and op not in declared)
