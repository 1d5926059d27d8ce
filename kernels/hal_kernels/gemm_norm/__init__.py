"""A product, the addition into the residual and the norm behind it in one call."""
