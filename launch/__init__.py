"""Launch scripts for the three deployments and a YAML file of presets for each model size; no code."""
