"""Inference with finished models: chat, and comparison of several models on the same prompts."""
