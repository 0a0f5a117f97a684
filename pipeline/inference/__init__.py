"""Answers of finished models: chat, and the same prompts through several models."""
