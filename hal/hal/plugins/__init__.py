"""Plug-ins: listed without import, probed in child processes, loaded one at a time."""

from hal.plugins.listing import PluginEntry, list_plugins
from hal.plugins.manager import PluginLoader, load_backends
from hal.plugins.registry import BackendRegistry
from hal.plugins.states import PluginState, PluginStatus
from hal.plugins.survey import PluginSurvey, survey_plugins

__all__ = [
    "BackendRegistry",
    "PluginEntry",
    "PluginLoader",
    "PluginState",
    "PluginStatus",
    "PluginSurvey",
    "list_plugins",
    "load_backends",
    "survey_plugins",
]
