"""Compute log-probabilities of a causal language model's tokens without ever materialising all logits.

B rows, S positions, M selected tokens, V vocabulary, H hidden size. Position t predicts token t + 1. The statistics of
a piece of logits are in `kernels/token_statistics.py`, the backbone's pass in `hidden_states.py`.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from pipeline.kernels.token_statistics import LogitScaling, token_statistics
from pipeline.models.forward.hidden_states import hidden_states
from pipeline.models.loading import WrappedModel, base_model

# Logits of one piece of the head: large enough for efficient matrix products, small compared with activations.
PIECE_BYTES = 512 * 2**20
# Selected tokens per row that the number of pieces is computed from. Not the true number: under ZeRO-3 every rank must
# call the head equally often, and the ranks' rows differ.
ROW_TOKENS = 1024


class TokenStatistics(NamedTuple):
    """Statistics of the selected next tokens, 0 elsewhere: log_probs and entropy, each (B, S - 1) fp32."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


class CausalLM(WrappedModel):
    """A causal language model as a module that maps token ids to log-probabilities of those tokens."""

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        selected: torch.Tensor,
        num_selected: int | None = None,
        temperature: float = 1.0,
        position_ids: torch.Tensor | None = None,
        num_tokens: int | None = None,
        right_padded: bool = False,
        with_entropy: bool = False,
    ) -> TokenStatistics:
        """Return log-probabilities (fp32, nats) of the selected tokens given the tokens before them.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) bool, True = real token, and every row padded on the right; or packed rows' 4-D mask.
            selected: (B, S - 1) bool, True = token t + 1 is selected.
            num_selected: M; None: counted here, which synchronises with a GPU.
            temperature: divides the logits.
            position_ids: (B, S) int64 of packed rows; other rows count from 0.
            num_tokens: number of real tokens, to compute padded rows without their padding (see `hidden_states`).
            right_padded: False: rows are checked for padding on their left, which synchronises with a GPU.
            with_entropy: compute also the entropy of each selected token's distribution.
        """
        hidden = hidden_states(
            self.model, input_ids, attention_mask, position_ids, num_tokens=num_tokens, right_padded=right_padded
        )  # (B, S, H)
        flat = selected.flatten()
        places = flat.nonzero() if num_selected is None else torch.nonzero_static(flat, size=num_selected)
        index = places.squeeze(1)  # (M,) into (B, S - 1)
        places = index + index // max(1, selected.shape[1])  # the same positions in (B, S)
        log_probs, entropy = self._in_pieces(
            hidden.flatten(0, 1).index_select(0, places),
            input_ids.flatten().index_select(0, places + 1),
            LogitScaling.from_config(self.config, temperature),
            num_pieces=self._num_pieces(len(input_ids)),
            with_entropy=with_entropy,
        )
        zeros = torch.zeros(selected.numel(), dtype=torch.float32, device=hidden.device)
        return TokenStatistics(
            zeros.scatter(0, index, log_probs).view_as(selected),
            None if entropy is None else zeros.scatter(0, index, entropy).view_as(selected),
        )

    def _num_pieces(self, rows: int) -> int:
        row_bytes = self.config.vocab_size * ROW_TOKENS * next(self.model.parameters()).element_size()
        return -(-rows // max(1, PIECE_BYTES // row_bytes))

    def _in_pieces(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        scaling: LogitScaling,
        *,
        num_pieces: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map (M, H) hidden states and (M,) targets to (M,) log-probabilities and (M,) entropies, piece by piece."""
        if num_pieces == 1:
            return self.head(hidden, targets, scaling, with_entropy)
        # Logits are not saved for the backward pass: each piece recomputes them.
        head = partial(checkpoint, self.head, use_reentrant=False) if torch.is_grad_enabled() else self.head
        pairs = zip(hidden.tensor_split(num_pieces), targets.tensor_split(num_pieces), strict=True)
        parts = [head(part, next_ids, scaling, with_entropy) for part, next_ids in pairs]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None

    def head(
        self, hidden: torch.Tensor, targets: torch.Tensor, scaling: LogitScaling, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = base_model(self.model).get_output_embeddings()(hidden)  # (m, V) in the model's type
        return token_statistics(logits, targets, scaling, with_entropy=with_entropy)
