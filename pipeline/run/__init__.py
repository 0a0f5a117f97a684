"""A run's folder and its life: entry, lock, stop request, outcome and exit code."""
