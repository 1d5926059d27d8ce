"""How an overlay's entry changes an earlier one: key by key, groups of values name by name."""

from __future__ import annotations

from typing import Any

from hal_capability_db.located import LocatedList, LocatedMap

_GROUP_LISTS = ("peak", "measured", "flags")


def merged(base: LocatedMap, over: LocatedMap) -> LocatedMap:
    """`base` with the keys of `over`; groups of rates and flags are merged name by name."""
    result = LocatedMap(over.place)
    for part in (base, over):
        for key, value in part.items():
            if key in _GROUP_LISTS and isinstance(result.get(key), LocatedList):
                result[key] = _merged_groups(result[key], value)
            else:
                result[key] = value
            result.places[key] = part.places[key]
    return result


def _merged_groups(base: LocatedList, over: Any) -> Any:
    """The groups of `over`, and what is left of those of `base` without the same names."""
    if not isinstance(over, LocatedList):
        return over
    named = {
        name
        for group in over
        if isinstance(group, LocatedMap) and isinstance(group.get("values"), LocatedMap)
        for name in group["values"]
    }
    merged = LocatedList(over.place)
    for index, group in enumerate(base):
        kept = group
        if isinstance(group, LocatedMap) and isinstance(group.get("values"), LocatedMap):
            kept = _without(group, named)
        if kept is not None:
            merged.append(kept)
            merged.places.append(base.places[index])
    merged.extend(over)
    merged.places.extend(over.places)
    return merged


def _without(group: LocatedMap, names: set[str]) -> LocatedMap | None:
    values = LocatedMap(group["values"].place)
    for name, value in group["values"].items():
        if name not in names:
            values[name] = value
            values.places[name] = group["values"].places[name]
    if not values:
        return None
    kept = LocatedMap(group.place)
    kept.update(group)
    kept.places = group.places
    kept["values"] = values
    return kept
