"""Stage 3 by direct preference optimisation: no reward model, no samples."""
