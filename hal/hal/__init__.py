"""The hardware abstraction layer: requests, selection, plans, plug-ins, bound ops.

Importing it runs nothing of a plug-in and does not import torch.
"""

from hal.hookspecs import hookimpl

__all__ = ["hookimpl"]
