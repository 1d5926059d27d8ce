"""What configurations rest on that nobody measured on a device. Free of torch.

A configuration that was only read as machine code may be right and slow; a plan says which of its
kernels run with such a one. What was measured is kept per device, see `hal_kernels.tuning`.
"""

from __future__ import annotations


def untuned(arch: str) -> str:
    """What default configurations rest on for an architecture."""
    return f"chosen from the machine code for {arch or 'an unknown architecture'}"
