"""What speed, memory and learning were measured by: programs (`speed/`, `learning/`), reports, and raw numbers."""
