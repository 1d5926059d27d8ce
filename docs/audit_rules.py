"""The rules of the audit for docs/audit-rules.md, asked from the rules themselves."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import hal.auditing.rules
import support
from hal.auditing.gates import GateClass
from hal.auditing.rule_texts import GATE_MEANINGS
from hal.auditing.rules import ALL_RULES


def gates() -> str:
    """What each class of findings means, and how many rules find such."""
    rows = []
    for gate in GateClass:
        count = sum(rule.gate is gate for rule in ALL_RULES)
        rows.append([f"`{gate.value}`", GATE_MEANINGS[gate], str(count)])
    return support.markdown(["Class", "Meaning", "Rules"], rows)


def rules() -> str:
    """Every rule, by family: id, class, what it sees, what to change."""
    parts = []
    for module in _families():
        summary = (module.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")
        rows = [
            [f"`{rule.id}`", rule.gate.value, f"{_sentence(rule.summary)}", _sentence(rule.remedy)]
            for rule in module.RULES
        ]
        table = support.markdown(["Rule", "Class", "What it sees", "What to change"], rows)
        parts.append(f"### {_title(module)}\n\n{summary}\n\n{table}")
    return "\n\n".join(parts)


def _families() -> Iterator[ModuleType]:
    """Modules of rules, in the order in which the rules are asked."""
    package = hal.auditing.rules
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    order = {rule.id: number for number, rule in enumerate(ALL_RULES)}
    found = [module for module in modules if hasattr(module, "RULES")]
    return iter(sorted(found, key=lambda module: order[module.RULES[0].id]))


def _title(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].replace("_", " ").capitalize()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
