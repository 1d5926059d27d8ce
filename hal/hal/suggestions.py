"""The nearest known name to a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, compared without regard to case, or None."""
    by_folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.casefold(), list(by_folded), n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy sentence: the nearest name if there is one, else the list of known names."""
    names = sorted(known)
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    return f"known names: {', '.join(names) or '(none)'}"
