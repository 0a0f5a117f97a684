"""Losses of direct preference optimisation: pure fp32 functions, whose sums the caller divides by the total weight.

Shapes: B pairs, or B responses with KTO. A log-ratio is log pi - log pi_ref of a response, summed over its tokens (IPO
by default: their mean). A weight of 0 marks a pair or response that only fills the batch. It adds nothing, even if it
holds NaN.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.tensor_ops import masked_sum


def dpo_loss(chosen: Tensor, rejected: Tensor, weights: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """sum_i w_i * -((1 - e) log sigmoid(beta d_i) + e log sigmoid(-beta d_i)), d = chosen - rejected log-ratios (B,).

    Rafailov et al. 2023, equation 7. Label smoothing e, the assumed share of wrong pairs: Mitchell 2023 (cDPO).
    """
    scaled, counted = _differences(chosen, rejected, weights)
    losses = -(1 - label_smoothing) * logsigmoid(beta * scaled) - label_smoothing * logsigmoid(-beta * scaled)
    return masked_sum(weights.float() * losses, counted)


def ipo_loss(chosen: Tensor, rejected: Tensor, weights: Tensor, *, beta: float) -> Tensor:
    """sum_i w_i * (d_i - 1 / (2 beta))**2, d = chosen - rejected log-ratios (B,).

    Azar et al. 2023, equation 17, with tau = beta.
    """
    difference, counted = _differences(chosen, rejected, weights)
    return masked_sum(weights.float() * (difference - 1 / (2 * beta)).square(), counted)


def kto_loss(
    log_ratios: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    z0: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """sum_i w_i * u_i * (1 - sigmoid(s_i * beta (r_i - z0))) over log-ratios r (B,).

    s = 1 and u = desirable_weight if the label (B,) bool is True, else s = -1 and u = undesirable_weight. z0 is a
    number without a gradient.
    Ethayarajh et al. 2024, arXiv 2402.01306.
    """
    assert log_ratios.dim() == 1 and log_ratios.shape == labels.shape == weights.shape, (log_ratios.shape, labels.shape)
    counted = weights > 0
    differences = torch.where(counted, log_ratios.float() - z0, 0)
    factors = torch.where(labels, desirable_weight, undesirable_weight)
    losses = torch.sigmoid(-beta * torch.where(labels, differences, -differences))
    return masked_sum(weights.float() * factors * losses, counted)


def kto_point(total: float, count: float) -> float:
    """Return KTO's reference point z0: the mean of `count` mismatched log-ratios with sum `total`, at least 0."""
    mean = total / max(count, 1)
    return 0.0 if mean <= 0 else mean  # not max(), which drops NaN: NaN must stay, so that the step is skipped


def _differences(chosen: Tensor, rejected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences (B,) fp32, 0 for pairs that do not count, and the mask (B,) of pairs that count."""
    assert chosen.dim() == 1 and chosen.shape == rejected.shape == weights.shape, (chosen.shape, rejected.shape)
    counted = weights > 0
    return torch.where(counted, chosen.float() - rejected.float(), 0), counted
