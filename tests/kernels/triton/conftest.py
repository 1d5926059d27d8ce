"""Triton kernels run here in its interpreter, which is made to round as hardware does."""

from __future__ import annotations

from faithful_interpreter import install

install()
