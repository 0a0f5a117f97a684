"""The benchmark: `python tests/bench ROW`. A row a goal: this project, a baseline, the device's limit."""
