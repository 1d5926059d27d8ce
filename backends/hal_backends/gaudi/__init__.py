"""Intel Gaudi accelerators."""
