"""The flags of all stages, their checks, and the DeepSpeed JSON made from them; no module here imports torch."""
