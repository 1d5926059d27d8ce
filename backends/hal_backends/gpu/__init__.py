"""What the accelerators' back ends share: specifications, limits, libraries, runtime, self-test."""
