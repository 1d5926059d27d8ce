"""Biren GPUs as a plug-in; the hooks are those of every accelerator."""

from hal_backends.detecting.accelerator import AcceleratorPlugin

plugin = AcceleratorPlugin("biren", "Biren")
