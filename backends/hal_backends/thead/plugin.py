"""T-Head PPUs as a plug-in; the hooks are those of every accelerator."""

from hal_backends.detecting.accelerator import AcceleratorPlugin

plugin = AcceleratorPlugin("thead", "T-Head")
