"""Sampling responses: backends (fused, static, eager), KV cache, and the hybrid engine over them."""
