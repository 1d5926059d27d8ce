"""Audits in tests: `@pytest.mark.hal_audit(no_fallback=True)`, and the fixture `hal_audit`.

A test with the mark fails if the audit of its call has a finding of a class that the mark names.
Nothing of torch or of the audit is imported for tests that use neither.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from hal.auditing.document import AuditReport
    from hal.auditing.program import audit

_MARK: Final = "hal_audit"
_NO_FALLBACK: Final = "lost-fast-path,unrouted,semantic,leaf-mismatch"
_KNOWN: Final = frozenset({"no_fallback", "fail_on", "mode"})
_KEY: Final[pytest.StashKey[Any]] = pytest.StashKey()
_MAX_SHOWN: Final = 20


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known, for `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        "hal_audit(no_fallback=False, fail_on=(), mode='full'): audit what the test runs with "
        "torch, and fail it if a finding is of a class of fail_on (no_fallback: of any fallback)",
    )


@pytest.fixture
def hal_audit(request: pytest.FixtureRequest) -> audit:
    """The audit of this test's call. It ends with the test, or with `finish()`, which returns the
    report."""
    item = request.node
    observed: audit = item.stash.setdefault(_KEY, _create(item))
    return observed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Observes the call of a test that has the mark or the fixture."""
    observed: audit | None = item.stash.get(_KEY, None)
    if observed is None and item.get_closest_marker(_MARK) is not None:
        observed = _create(item)
    if observed is None:
        return (yield)
    observed.begin()
    try:
        result = yield
    except BaseException as error:
        observed.end(error)
        raise
    observed.end()
    _check(item, observed.result)
    return result


def _create(item: pytest.Item) -> audit:
    from hal.auditing.program import audit

    return audit(mode=_options(item).get("mode", "full"), subject=item.nodeid)


def _options(item: pytest.Item) -> Mapping[str, Any]:
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return {}
    unknown = mark.kwargs.keys() - _KNOWN
    if unknown or mark.args:
        raise pytest.UsageError(
            f"@pytest.mark.hal_audit of {item.nodeid}: required keywords of "
            f"{', '.join(sorted(_KNOWN))}; found {', '.join(sorted(unknown)) or mark.args!r}"
        )
    return mark.kwargs


def _check(item: pytest.Item, report: AuditReport) -> None:
    from hal.auditing.gate import gated_findings
    from hal.auditing.program import read_classes

    options = _options(item)
    words: str | Iterable[str] = options.get("fail_on", ())
    classes = read_classes(words)
    if options.get("no_fallback"):
        classes |= read_classes(_NO_FALLBACK)
    failed = gated_findings(report, classes)
    if not failed:
        return
    lines = [f"the audit of {report.subject} has {len(failed)} findings that fail it:"]
    for finding in failed[:_MAX_SHOWN]:
        lines.append(f"{finding.where or 'an unknown place'}: {finding.title} ({finding.rule})")
        lines += [f"    {e.what}: required {e.required}, found {e.found}" for e in finding.evidence]
        if finding.remedy:
            lines.append(f"    remedy: {finding.remedy}")
    pytest.fail("\n".join(lines), pytrace=False)
