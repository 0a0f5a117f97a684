"""The formulas of DeepSpeed-Chat's PPO step, written from their description, for the baseline alone.

B sequences, S tokens (prompt and answer), L = S - 1 predicted positions, P prompt tokens, V vocabulary. Position t of a
(B, L) tensor predicts token t + 1. Losses are in the logits' own dtype, as that system's defaults have it.
"""

import torch
from torch import Tensor

KL_COEF, REWARD_CLIP, RATIO_CLIP, VALUE_CLIP, GAMMA, GAE_LAMBDA = 0.1, 5.0, 0.2, 0.2, 1.0, 0.95


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """(B, S, V) logits and (B, S) ids -> (B, L): a log-softmax over all positions and the whole vocabulary."""
    return torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def token_rewards(log_probs: Tensor, ref_log_probs: Tensor, scores: Tensor, mask: Tensor, *, prompt: int) -> Tensor:
    """(B, L): the KL penalty everywhere, and the clamped score (B,) once, where the answer's end is predicted.

    Args:
        mask: (B, S) bool, True = not a padding token.
    """
    last = (prompt - 1 + mask[:, prompt:].sum(1)).clamp(max=log_probs.shape[1] - 1)
    rewards = -KL_COEF * (log_probs - ref_log_probs)
    clamped = scores.clamp(-REWARD_CLIP, REWARD_CLIP).to(rewards).unsqueeze(1)
    rewards = rewards.scatter_add(1, last.unsqueeze(1), clamped)
    return rewards * (torch.arange(rewards.shape[1], device=mask.device) <= last.unsqueeze(1))


def gae(rewards: Tensor, values: Tensor, *, prompt: int) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, L - P + 1) of the answer region; a loop over positions, bootstrapped with 0."""
    start = prompt - 1
    found, following = [], torch.zeros_like(values[:, 0])
    for position in reversed(range(start, rewards.shape[1])):
        after = values[:, position + 1] if position + 1 < rewards.shape[1] else 0.0
        delta = rewards[:, position] + GAMMA * after - values[:, position]
        following = delta + GAMMA * GAE_LAMBDA * following
        found.append(following)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values[:, start:]


def actor_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clipped surrogate, averaged over the mask; all (B, T)."""
    ratio = torch.exp((log_probs - old) * mask)
    clipped = ratio.clamp(1.0 - RATIO_CLIP, 1.0 + RATIO_CLIP)
    return (torch.maximum(-advantages * ratio, -advantages * clipped) * mask).sum() / mask.sum()


def critic_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Half the larger of the squared errors with and without a clip around the old values; all (B, T)."""
    clipped = torch.clamp(values, old - VALUE_CLIP, old + VALUE_CLIP)
    larger = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (larger * mask).sum() / mask.sum()
