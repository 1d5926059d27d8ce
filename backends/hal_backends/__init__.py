"""In-tree backends: one folder per vendor, through the same hooks as any outsider's."""
