"""The environment variables of `hal` itself; all others follow from the settings' sections."""

PREFIX = "HAL_"
CONFIG_VARIABLE = "HAL_CONFIG"
DEBUG_VARIABLE = "HAL_DEBUG"
