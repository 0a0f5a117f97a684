"""Commands for rewards: `rlhf reward` tries functions, `rlhf sample` writes scored answers, `rlhf eval` compares."""
