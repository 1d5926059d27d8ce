"""An example backend for halstack."""
