"""An accelerator made usable in this process, through torch's device of the platform."""

from __future__ import annotations
