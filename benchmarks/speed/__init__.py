"""The benchmark: `python -m benchmarks.speed ROW`. A row a goal: this project, a baseline, the device's limit."""
