"""Compute log-probabilities of an encoder-decoder model's labels.

B rows, S positions of the encoder, T of the decoder, M labels that count, V vocabulary. transformers' own forward pass
computes the logits of all T positions, because heads differ: some scale, some add a bias.
"""

import torch

from pipeline.data.batching import IGNORED
from pipeline.kernels.token_statistics import LogitScaling, token_statistics
from pipeline.models.loading import WrappedModel, base_model


class Seq2SeqLM(WrappedModel):
    """An encoder-decoder model as a module that maps sources and labels to log-probabilities of the labels."""

    def forward(self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (B, T) fp32, in nats, of the labels given the source and the labels before; else 0.

        Args:
            input_ids: (B, S) int64, the source; attention_mask: (B, S) bool, True = real token.
            labels: (B, T) int64, IGNORED where there is none; the decoder reads them shifted by one position.
        """
        inner = base_model(self.model)
        logits = inner(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=inner.prepare_decoder_input_ids_from_labels(labels),
            use_cache=False,
        ).logits
        return self.label_log_probs(logits, labels)

    def label_log_probs(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map (B, T, V) logits to (B, T) log-probabilities of the labels; 0 where there is none."""
        index = (labels.flatten() != IGNORED).nonzero().squeeze(1)  # (M,) into (B, T)
        log_probs, _ = token_statistics(
            logits.flatten(0, 1).index_select(0, index),
            labels.flatten().index_select(0, index),
            LogitScaling(),
            with_entropy=False,
        )
        zeros = torch.zeros(labels.numel(), dtype=torch.float32, device=labels.device)
        return zeros.scatter(0, index, log_probs).view_as(labels)
