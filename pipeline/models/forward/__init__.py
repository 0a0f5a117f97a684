"""Forward passes over padded and packed rows: hidden states, log-probabilities, fused layers of transformers models."""
