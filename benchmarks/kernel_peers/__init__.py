"""Our Triton kernels beside the public ones of others, compiled here without a device."""
