"""Losses of the reward model over pairs of answers: pure fp32 functions, whose sums the caller divides by the weights.

Shapes: B pairs, S positions of a right-padded sequence. A weight of 0 marks a row that only fills the batch. It adds
nothing to the loss or the gradients, even if it holds NaN.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.tensor_ops import lengths_to_mask, masked_mean, masked_sum


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, weights: Tensor, *, margins: Tensor | None = None, centering_coef: float = 0.0
) -> Tensor:
    """sum_i w_i * (-log sigmoid(c_i - r_i - m_i) + centering_coef * (c_i + r_i)**2) over scores (B,) of the last token.

    Pair loss: Ouyang et al. 2022 (InstructGPT), section 3.5, equation 1, after Bradley and Terry 1952. Margins m:
    Touvron et al. 2023 (Llama 2), section 3.2.2. Centering, which pulls the arbitrary offset of the scores to zero:
    Eisenstein et al. 2023, "Helping or Herding?", the regulariser of their reward-model objective.
    """
    assert chosen.dim() == 1 and chosen.shape == rejected.shape == weights.shape, (chosen.shape, rejected.shape)
    assert margins is None or margins.shape == chosen.shape, margins
    chosen, rejected = chosen.float(), rejected.float()
    difference = chosen - rejected if margins is None else chosen - rejected - margins.float()
    counted = weights > 0
    pair_losses = -logsigmoid(torch.where(counted, difference, 0))
    if centering_coef != 0:
        pair_losses = pair_losses + centering_coef * torch.where(counted, chosen + rejected, 0).square()
    return masked_sum(weights.float() * pair_losses, counted)


def per_token_loss(
    chosen_values: Tensor,
    rejected_values: Tensor,
    chosen_ids: Tensor,
    rejected_ids: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    weights: Tensor,
) -> Tensor:
    """sum_i w_i * mean over t in [d_i, e_i) of -log sigmoid(c_it - r_it), with values c, r and ids (B, S).

    DeepSpeed-Chat's pair loss: d is the first position where the two rows differ, and e the end of the longer one. So
    padding of the shorter row counts. PPO reads the last token alone: `bradley_terry_loss` is the default, and this
    loss is for parity with DeepSpeed-Chat. Rows that never differ count as log 2 without a gradient.
    """
    assert chosen_values.dim() == 2 and chosen_values.shape == rejected_values.shape, chosen_values.shape
    compared = _compared_mask(chosen_ids, rejected_ids, chosen_lengths, rejected_lengths)  # (B, S)
    assert compared.shape == chosen_values.shape and weights.shape == compared.shape[:1], (compared.shape, weights)
    counted = weights > 0
    compared = compared & counted.unsqueeze(1)
    difference = torch.where(compared, chosen_values.float() - rejected_values.float(), 0)
    pair_losses = masked_mean(-logsigmoid(difference), compared, dim=1)  # (B,)
    pair_losses = torch.where(compared.any(dim=1), pair_losses, math.log(2))
    return masked_sum(weights.float() * pair_losses, counted)


def _compared_mask(
    chosen_ids: Tensor, rejected_ids: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor
) -> Tensor:
    """Return the (B, S) mask from the first position where the two rows differ to the end of the longer one.

    Rows differ where only one has ended, even if the ids agree because the padding id is the EOS id.
    """
    assert chosen_ids.shape == rejected_ids.shape and chosen_ids.dim() == 2, (chosen_ids.shape, rejected_ids.shape)
    in_chosen = lengths_to_mask(chosen_lengths, chosen_ids.shape[1])
    in_rejected = lengths_to_mask(rejected_lengths, rejected_ids.shape[1])
    in_longer = in_chosen | in_rejected
    differs = ((chosen_ids != rejected_ids) | (in_chosen != in_rejected)) & in_longer
    return (differs.long().cumsum(1) > 0) & in_longer
