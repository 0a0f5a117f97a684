"""Launch scripts for the three deployments and YAML presets for each model size; package data without code."""
