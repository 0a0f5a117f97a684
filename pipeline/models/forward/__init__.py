"""Forward passes over padded and packed rows: hidden states of a backbone, log-probabilities of a language model."""
