"""Forward passes for generation over a KV cache, and the weights that they read."""
