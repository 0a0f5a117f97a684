"""Stage 3: PPO with a hybrid engine."""
