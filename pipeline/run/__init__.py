"""A run's folder and its life: entry, lock, stop request, outcome, exit code and report process."""
