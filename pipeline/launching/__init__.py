"""Launching of stages: the flags and the plan of `rlhf train`, the machine, the supervisor. Imports no torch."""
