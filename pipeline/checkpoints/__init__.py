"""Resume checkpoints, what must be the same on resume, and finished model folders."""
