"""The loss of supervised fine-tuning: pure, and a sum, so that it does not depend on how a step is cut up."""

import torch
from torch import Tensor

from pipeline.tensor_ops import masked_sum


def token_sum_loss(log_probs: Tensor, trained_mask: Tensor) -> Tensor:
    """Negative log-likelihood summed over the trained tokens: log_probs (B, S) fp32, mask True where trained.

    The caller multiplies by world_size / (trained tokens of the whole step on all ranks): ranks average gradients, so
    the step then follows the mean over all its tokens, for any number of ranks and any micro-batch size.
    """
    assert log_probs.dim() == 2 and log_probs.dtype == torch.float32, (log_probs.shape, log_probs.dtype)
    return -masked_sum(log_probs, trained_mask)
