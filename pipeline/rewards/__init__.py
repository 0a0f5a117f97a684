"""Rewards of responses: the rows that they read (rows.py), and a reward model as one of them (reward_model.py)."""
