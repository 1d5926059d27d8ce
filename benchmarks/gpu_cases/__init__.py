"""The cases of `gpu_check.py`: every Triton kernel with inputs, the exact result, and a peer."""
