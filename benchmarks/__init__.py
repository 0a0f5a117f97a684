"""Measurements of speed, memory and learning: programs (`speed/`, `learning/`), reports, and raw numbers."""
