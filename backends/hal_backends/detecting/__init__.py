"""What the accelerators' detections share: PCI, device nodes, software, tools, verdicts."""
