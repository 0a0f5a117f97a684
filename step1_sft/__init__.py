"""Stage 1: supervised fine-tuning."""
