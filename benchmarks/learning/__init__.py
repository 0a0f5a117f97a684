"""RLHF of a real checkpoint on real preferences: what PPO gains, by a reward model that it has not seen."""
