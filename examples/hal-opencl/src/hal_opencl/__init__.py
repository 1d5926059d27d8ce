"""OpenCL devices as a halstack plug-in."""
