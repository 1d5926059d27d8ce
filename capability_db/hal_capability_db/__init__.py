"""The capability database of devices. It holds no data yet: a CPU is detected on its host."""
