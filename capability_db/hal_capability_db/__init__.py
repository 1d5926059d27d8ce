"""The capability database of devices."""
