"""A run's folder and its life: entry, lock, heartbeat, stop request, outcome and exit code."""
