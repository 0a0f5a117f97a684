"""Programs about rewards: reward tries functions, sample writes scored answers."""
