"""The hardware abstraction layer: requests, selection, plans, plug-ins, bound ops."""
