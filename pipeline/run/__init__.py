"""A run's folder and its life: entry, lock, signs of life, stopping, outcome and exit code."""
