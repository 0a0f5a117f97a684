"""Compute log-probabilities of a causal language model's tokens without ever materialising all logits.

B rows, S positions, M selected tokens, V vocabulary, H hidden size. Position t predicts token t + 1. The statistics of
a piece of logits are in `kernels/token_statistics.py`, the backbone's pass in `hidden_states.py`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch.utils.checkpoint import checkpoint

from pipeline.kernels.divergences import Divergence, divergences
from pipeline.kernels.token_statistics import LogitScaling, token_statistics
from pipeline.models.forward.hidden_states import hidden_states
from pipeline.models.forward.shared_prompts import RowSettings
from pipeline.models.loading import WrappedModel, base_model
from pipeline.models.partitions import is_partitioned

# Logits of one piece of the head: large enough for efficient matrix products, small compared with activations.
PIECE_BYTES = 512 * 2**20
# The same in fp32 where two models' distributions are compared, which needs up to 11 tensors of this size. On an H200
# 64 MiB take 2 to 3 times as long and 512 MiB a tenth less (benchmarks/reports/distillation_qwen_h200_202611.md).
COMPARED_BYTES = 256 * 2**20
# Selected tokens per row that the number of pieces is computed from under ZeRO-3, not the true number: every rank must
# call the head equally often, and the ranks' rows differ.
ROW_TOKENS = 1024


class TokenStatistics(NamedTuple):
    """Statistics of the selected next tokens, 0 elsewhere, each (B, S - 1) fp32; None: not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    divergence: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another model's distributions of the same selected tokens.

    kind: the divergence from them.
    hidden: (M, H') that model's hidden states (see `hidden_of`), in its type.
    model: maps pieces of them to logits.
    longest: most selected tokens of a row, the same on every rank.
    """

    kind: Divergence
    hidden: torch.Tensor
    model: "CausalLM"
    longest: int


class CausalLM(WrappedModel):
    """A causal language model as a module that maps token ids to log-probabilities of those tokens.

    stores_logits: the logits of all pieces are stored for the backward pass. Else it computes those of several pieces
        again.
    """

    stores_logits = False

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        selected: torch.Tensor,
        num_selected: int | None = None,
        temperature: float = 1.0,
        position_ids: torch.Tensor | None = None,
        with_entropy: bool = False,
        comparison: Comparison | None = None,
        hidden_only: bool = False,
        **rows: Unpack[RowSettings],
    ) -> TokenStatistics | torch.Tensor:
        """Return log-probabilities (fp32, nats) of the selected tokens given the tokens before them.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) bool, True = real token, and every row padded on the right; or packed rows' 4-D mask.
            selected: (B, S - 1) bool, True = token t + 1 is selected.
            num_selected: M; None: counted here, which synchronises with a GPU.
            temperature: divides the logits.
            position_ids: (B, S) int64 of packed rows; other rows count from 0.
            with_entropy: compute also the entropy of each selected token's distribution.
            comparison: compute also the divergence of that distribution from another model's.
            hidden_only: return the (M, H) hidden states of the selected tokens alone, for a `Comparison`.
            rows: how they pass (see `RowSettings`).
        """
        hidden = hidden_states(self.model, input_ids, attention_mask, position_ids, **rows)  # (B, S, H)
        flat = selected.flatten()
        places = flat.nonzero() if num_selected is None else torch.nonzero_static(flat, size=num_selected)
        index = places.squeeze(1)  # (M,) into (B, S - 1)
        places = index + index // max(1, selected.shape[1])  # the same positions in (B, S)
        chosen = hidden.flatten(0, 1).index_select(0, places)
        if hidden_only:
            return chosen
        columns = self._in_pieces(
            chosen,
            input_ids.flatten().index_select(0, places + 1),
            LogitScaling.from_config(self.config, temperature),
            num_pieces=self._num_pieces(len(input_ids), len(index), comparison),
            with_entropy=with_entropy,
            comparison=comparison,
        )
        zeros = torch.zeros(selected.numel(), dtype=torch.float32, device=hidden.device)
        wide = [None if column is None else zeros.scatter(0, index, column).view_as(selected) for column in columns]
        return TokenStatistics(*wide)  # type: ignore[arg-type]  # there are always log-probabilities

    def _num_pieces(self, rows: int, num_selected: int, comparison: Comparison | None) -> int:
        """Return the number of pieces; with partitioned weights it is the same on every rank that has so many rows."""
        if comparison is not None:  # a piece may be less than a row
            return -(-rows * comparison.longest * self.config.vocab_size * 4 // COMPARED_BYTES)
        head = base_model(self.model).get_output_embeddings().weight
        token_bytes = self.config.vocab_size * head.element_size()
        if is_partitioned(head):
            return -(-rows // max(1, PIECE_BYTES // (ROW_TOKENS * token_bytes)))
        return max(1, -(-num_selected // max(1, PIECE_BYTES // token_bytes)))

    def _in_pieces(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        scaling: LogitScaling,
        *,
        num_pieces: int,
        with_entropy: bool,
        comparison: Comparison | None,
    ) -> TokenStatistics:
        """Map (M, H) hidden states and (M,) targets to statistics (M,), piece by piece."""
        if num_pieces == 1:
            return self.head(hidden, targets, scaling, with_entropy, comparison)
        recomputes = torch.is_grad_enabled() and (comparison is not None or not self.stores_logits)
        head = partial(checkpoint, self.head, use_reentrant=False) if recomputes else self.head
        pairs = zip(hidden.tensor_split(num_pieces), targets.tensor_split(num_pieces), strict=True)
        others: list[Comparison | None] = [None] * num_pieces
        if comparison is not None:
            others = [replace(comparison, hidden=part) for part in comparison.hidden.tensor_split(num_pieces)]
        parts = [head(*pair, scaling, with_entropy, other) for pair, other in zip(pairs, others, strict=True)]
        wide = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        return TokenStatistics(*wide)  # type: ignore[arg-type]

    def head(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        scaling: LogitScaling,
        with_entropy: bool,
        comparison: Comparison | None,
    ) -> TokenStatistics:
        """Map a piece (m, H) of hidden states and its (m,) targets to statistics (m,)."""
        logits = self.logits(hidden)
        divergence = None
        if comparison is not None:
            divergence = self.compared(logits, comparison, scaling)
        return TokenStatistics(*token_statistics(logits, targets, scaling, with_entropy=with_entropy), divergence)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (m, H) to logits (m, V) in the model's type."""
        logits: torch.Tensor = base_model(self.model).get_output_embeddings()(hidden)
        return logits

    def compared(self, logits: torch.Tensor, comparison: Comparison, scaling: LogitScaling) -> torch.Tensor:
        """Return the divergences (m,) of the distributions that logits (m, V) give from those of another model."""
        theirs = LogitScaling.from_config(comparison.model.config, scaling.temperature)
        with torch.no_grad():
            others = comparison.model.logits(comparison.hidden)
        # Heads are padded to different widths; the tokens of the tokenizer come first.
        width = min(logits.shape[1], others.shape[1])
        log_probs = torch.log_softmax(scaling.applied_to(logits[:, :width].float()), dim=-1)
        other_log_probs = torch.log_softmax(theirs.applied_to(others[:, :width].float()), dim=-1)
        return divergences(log_probs, other_log_probs, kind=comparison.kind)
