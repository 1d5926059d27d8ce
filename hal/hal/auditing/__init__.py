"""Audits: what really ran, which fast paths it lost, and the proof. For any PyTorch program.

`hal.audit()` is the entrance; importing this package imports no torch.
"""
