"""Say in words what pydantic found wrong with a settings section or a waiver."""

from pydantic import BaseModel, ValidationError

from hal.suggestions import did_you_mean

_SHOWN = 80


def describe_first_error(
    error: ValidationError, model: type[BaseModel]
) -> tuple[str, str, str, str]:
    """(dotted key, required, found, remedy) of the first error. Secret values are not shown."""
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "(the whole)"
    last = str(first["loc"][-1]) if first["loc"] else ""
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return (
            key,
            "a known key",
            f"the unknown key {last!r}",
            did_you_mean(last, model.model_fields),
        )
    if first["type"] == "missing":
        return key, "a value, as it has no default", "nothing", f"set {key}"
    is_secret = field is not None and "Secret" in str(field.annotation)
    found = "a secret (not shown)" if is_secret else _shown(first["input"])
    what = (field.description if field is not None else None) or "see the documentation of the key"
    return key, first["msg"], found, f"correct {key}: {what}"


def _shown(value: object) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
