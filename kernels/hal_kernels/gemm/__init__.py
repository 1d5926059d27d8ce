"""Matrix products on CPUs: torch's packed kernels, and kernels generated for this machine's ISA."""
