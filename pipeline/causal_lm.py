"""Log-probabilities of a causal language model's tokens, without ever holding all logits.

B rows, S positions, V vocabulary, H hidden size. Position t predicts token t + 1.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.modeling import backbone, base_model
from pipeline.tensor_ops import position_ids_from_mask

# Above this vocabulary the head runs row by row under recomputation: V x S logits are then the largest tensor by far.
SMALL_VOCABULARY = 8192


class TokenStatistics(NamedTuple):
    """Of the selected next tokens, 0 elsewhere: log_probs and entropy, each (B, S - 1) fp32."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None


class CausalLM(nn.Module):
    """A causal language model seen as a map from token ids to log-probabilities of those tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    @property
    def config(self) -> Any:
        return base_model(self.model).config

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        selected: torch.Tensor,
        temperature: float = 1.0,
        position_ids: torch.Tensor | None = None,
        with_entropy: bool = False,
    ) -> TokenStatistics:
        """Log-probabilities (fp32) of the selected tokens given what stands before them.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) bool, True = real token; or (B, 1, S, S) bool, True = may attend (packed rows).
            selected: (B, S - 1) bool, True = token t + 1 is wanted.
            temperature: divides the logits.
            position_ids: (B, S) int64; from the mask where None.
        """
        if position_ids is None:
            position_ids = position_ids_from_mask(attention_mask)
        outputs = backbone(self.model)(
            input_ids=input_ids, attention_mask=self._for_attention(attention_mask), position_ids=position_ids,
            use_cache=False,
        )  # fmt: skip
        hidden = outputs.last_hidden_state[:, :-1][selected]  # (M, H)
        targets = input_ids[:, 1:][selected]  # (M,)
        log_probs, entropy = self._by_chunks(hidden, targets, temperature, chunks=self._num_chunks(len(input_ids)))
        scattered = [
            torch.zeros(selected.shape, dtype=torch.float32, device=hidden.device).masked_scatter(selected, values)
            for values in (log_probs, entropy)
        ]
        return TokenStatistics(scattered[0], scattered[1] if with_entropy else None)

    def _for_attention(self, mask: torch.Tensor) -> torch.Tensor:
        # Eager attention adds a 4-D mask to its scores: True and False would become 1 and 0, and nothing be hidden.
        if mask.dim() == 2 or self.config._attn_implementation != "eager":
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _num_chunks(self, rows: int) -> int:
        # A function of the configuration alone: under ZeRO-3 every rank must call the head equally often.
        return 1 if self.config.vocab_size <= SMALL_VOCABULARY else rows

    def _by_chunks(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, *, chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = HeadStatistics(self.logits, temperature)
        if chunks == 1:
            return head(hidden, targets)
        pairs = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        parts = [checkpoint(head, part, wanted, use_reentrant=False) for part, wanted in pairs]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(M, H) -> (M, V) fp32 through the model's own head and whatever its configuration does to the logits."""
        model = base_model(self.model)
        logits = model.get_output_embeddings()(hidden).float()
        scale = getattr(model.config, "logit_scale", None) or 1.0 / (getattr(model.config, "logits_scaling", None) or 1)
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = logits * scale if scale != 1.0 else logits
        return torch.tanh(logits / cap) * cap if cap else logits


class HeadStatistics:
    """(M, H) hidden states and (M,) targets -> (M,) log-probabilities and (M,) entropies, fp32; the latter detached."""

    def __init__(self, logits: Any, temperature: float) -> None:
        self.logits = logits
        self.temperature = temperature

    def __call__(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_log_probs = torch.log_softmax(self.logits(hidden) / self.temperature, dim=-1)
        with torch.no_grad():
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return all_log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy
