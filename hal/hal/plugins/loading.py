"""Import one plug-in and check that it may be used: the same steps in child and host process."""

import importlib.metadata
import traceback
from dataclasses import dataclass

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hal import hookspecs
from hal.errors import HalError, PluginError, PluginRejectedError
from hal.hookspecs import ENTRY_POINT_GROUP, PLUGIN_API, PROJECT, BackendInfo
from hal.plugins.listing import PluginEntry
from hal.plugins.validation import checked_info
from hal.suggestions import did_you_mean

HOOK_NAMES = tuple(sorted(name for name in vars(hookspecs) if name.startswith("hal_")))
API_VERSION = ".".join(str(part) for part in PLUGIN_API)


@dataclass(frozen=True, slots=True)
class RegisteredPlugin:
    """A plug-in whose module is imported and whose API range fits.

    Each has a pluggy manager of its own, so that a hook call reaches this plug-in only.
    """

    entry: PluginEntry
    info: BackendInfo
    manager: pluggy.PluginManager

    def implements(self, hook: str) -> bool:
        """Whether the plug-in has an implementation of the hook."""
        return bool(getattr(self.manager.hook, hook).get_hookimpls())


def call_error(entry: PluginEntry, during: str, error: BaseException) -> PluginError:
    """The error for an exception that came out of a plug-in."""
    if isinstance(error, HalError):
        found, remedy = error.one_line(), error.remedy
    else:
        found = f"{type(error).__name__}: {_message(error)}{_location(error)}"
        remedy = report_or_disable(entry)
    return PluginError(f"{entry}, {during}", "no exception", found, remedy)


def answer_error(entry: PluginEntry, hook: str, error: Exception) -> PluginError:
    """The error for an answer that is not what the hook promises."""
    required, _, found = str(error).partition(", found ")
    return PluginError(
        f"{entry}, hook {hook}",
        required.removeprefix("required "),
        found or "something else",
        report_or_disable(entry),
    )


def report_or_disable(entry: PluginEntry) -> str:
    """The remedy for a plug-in that misbehaves."""
    return (
        f"upgrade {entry.distribution} or report it to its authors; to go on without it, set "
        f'plugins.disable = ["{entry.key}"]'
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)[:500] or "(no message)"
    except (Exception, SystemExit) as nested:  # noqa: BLE001 - a plug-in's __str__ may do anything
        return f"(its message raised {type(nested).__name__})"


def _location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def import_plugin(entry: PluginEntry) -> object:
    """Run the plug-in's import.

    Raises:
        PluginError: the import raised, `SystemExit` included.
    """
    point = importlib.metadata.EntryPoint(entry.name, entry.value, ENTRY_POINT_GROUP)
    try:
        implementation: object = point.load()
    except (Exception, SystemExit) as error:
        raise call_error(entry, f"import of {entry.value}", error) from error
    return implementation


def register_plugin(entry: PluginEntry, implementation: object) -> RegisteredPlugin:
    """Check hook names and arguments, then call `hal_backend_info` and check the API range.

    Raises:
        PluginRejectedError: the hooks do not fit, or the API range excludes this version.
        PluginError: `hal_backend_info` raised or answered something else.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(implementation, name=entry.key)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _hook_mismatch(entry, implementation, error) from error
    except (Exception, SystemExit) as error:
        raise call_error(entry, "registration", error) from error
    info = _backend_info(entry, manager)
    _check_api_range(entry, info)
    if info.name != entry.name:
        raise PluginRejectedError(
            str(entry),
            f"the name of its entry point, {entry.name!r}, in BackendInfo.name",
            repr(info.name),
            f"{entry.distribution} must use one name in both places",
        )
    return RegisteredPlugin(entry, info, manager)


def _backend_info(entry: PluginEntry, manager: pluggy.PluginManager) -> BackendInfo:
    caller = manager.hook.hal_backend_info
    if not caller.get_hookimpls():
        raise PluginRejectedError(
            str(entry),
            "an implementation of hal_backend_info, marked with hal.hookspecs.hookimpl",
            "none",
            f"{entry.distribution} must implement it; the entry point is {entry.value}",
        )
    try:
        answer: object = caller()
    except (Exception, SystemExit) as error:
        raise call_error(entry, "hook hal_backend_info", error) from error
    try:
        return checked_info(answer)
    except (TypeError, ValueError) as error:
        raise answer_error(entry, "hal_backend_info", error) from error


def _check_api_range(entry: PluginEntry, info: BackendInfo) -> None:
    try:
        fits = SpecifierSet(info.api_range).contains(API_VERSION, prereleases=True)
    except InvalidSpecifier as error:
        raise PluginRejectedError(
            str(entry),
            'a version specifier such as ">=1.0,<2" in BackendInfo.api_range',
            repr(info.api_range),
            f"{entry.distribution} must state its plug-in API range",
        ) from error
    if not fits:
        raise PluginRejectedError(
            str(entry),
            f"plug-in API {info.api_range}",
            f"plug-in API {API_VERSION}",
            f"install a version of {entry.distribution} made for plug-in API {API_VERSION}",
        )


def _hook_mismatch(
    entry: PluginEntry, implementation: object, error: pluggy.PluginValidationError
) -> PluginRejectedError:
    names = getattr(implementation, "__dict__", {})
    unknown = [name for name in names if _is_unknown_hook(names[name], name)]
    advice = "; ".join(f"{name}: {did_you_mean(name, HOOK_NAMES)}" for name in unknown)
    return PluginRejectedError(
        str(entry),
        "only the hooks of hal.hookspecs, with their keyword arguments",
        " ".join(str(error).split()),
        advice or f"install a version of {entry.distribution} made for plug-in API {API_VERSION}",
    )


def _is_unknown_hook(value: object, name: str) -> bool:
    return hasattr(value, f"{PROJECT}_impl") and name not in HOOK_NAMES
