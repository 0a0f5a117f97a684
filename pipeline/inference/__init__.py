"""Answers of models: chat, comparison, sampling and trials; `answer_scores.py` leads from prompts to scored answers."""
