"""GRPO beside TRL with vLLM on one GPU, in one job: `python -m benchmarks.race ROW`."""
