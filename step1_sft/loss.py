"""The loss of supervised fine-tuning: a pure function that returns a sum, whatever the micro-batches of a step are."""

import torch
from torch import Tensor

from pipeline.tensor_ops import masked_sum


def token_sum_loss(log_probs: Tensor, trained_mask: Tensor) -> Tensor:
    """Return the negative log-likelihood, summed over the trained tokens: log_probs (B, S) fp32, mask True if trained.

    The caller multiplies it by world_size / (trained tokens of the step on all ranks). Ranks average their gradients,
    so the step follows the mean over all its tokens, for any number of ranks and any micro-batch size.
    """
    assert log_probs.dim() == 2 and log_probs.dtype == torch.float32, (log_probs.shape, log_probs.dtype)
    return -masked_sum(log_probs, trained_mask)
