"""The engines that `benchmarks/peers.py` and `benchmarks/http_load.py` compare.

`catalogue` names them; `environments` and `weights` make what they need; `process` and `child` run
one of them in its own process; the other modules hold one engine each and import its library.
"""
