"""Peer access between devices as it is on this host: written, read back and compared bit by bit.

A capability query only claims it; patched drivers and some switches answer yes and deliver wrong
data. `verification` asks each pair in a process of its own, `store` keeps what came out.
"""
