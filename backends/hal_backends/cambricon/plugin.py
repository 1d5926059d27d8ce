"""Cambricon MLUs as a plug-in; the hooks are those of every accelerator."""

from hal_backends.detecting.accelerator import AcceleratorPlugin

plugin = AcceleratorPlugin("cambricon", "Cambricon")
