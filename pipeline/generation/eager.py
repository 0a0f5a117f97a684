"""The eager backend: sampling with the forward pass of transformers, for CPUs and models that no other supports.

Also for evaluations and chat of finished models. Finished rows leave the batch, but none joins it. N rows (prompts x
samples), P longest prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Rollout, Sampling, draw, rollout_uniforms
from pipeline.tensor_ops import gather_log_probs, lengths_to_mask, pad_rows, position_ids_from_mask

# Finished rows leave the batch when they are at least this share of it: a copy of the KV cache against decode steps of
# rows that have ended. Chosen by hand.
COMPACT_ABOVE = 0.25


def truncate(logits: torch.Tensor, *, top_p: float, top_k: int) -> torch.Tensor:
    """Set (N, V) logits outside the top_k tokens and the top_p nucleus to -inf.

    The nucleus is the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al. 2020). Tokens
    as likely as the last of either set belong to it: which of them a sort puts first would be chance.
    """
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ordered = logits.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        last = ordered.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < last, float("-inf"))
    return logits


class Decoder:
    """The batch of rows still being generated: their KV cache, masks, positions and next logits."""

    def __init__(self, model: nn.Module, prompts: list[torch.Tensor], pad_id: int) -> None:
        self.model = model
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
        ids = pad_rows(prompts, pad_id, side="left")  # (N, P)
        self.mask = lengths_to_mask(lengths, ids.shape[1]).flip(1)
        self.rows = torch.arange(len(prompts), device=ids.device)
        self.cache: Any = None
        self.logits = self._forward(ids, position_ids_from_mask(self.mask))
        self.positions = lengths

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        outputs = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = outputs.past_key_values
        return outputs.logits[:, -1].float()  # (N, V)

    def advance(self, tokens: torch.Tensor) -> None:
        """Append one token (N,) to each row and compute the next logits."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = self._forward(tokens.unsqueeze(1), self.positions.unsqueeze(1))
        self.positions = self.positions + 1

    def keep(self, alive: torch.Tensor) -> None:
        """Remove all rows but those where `alive` (N,) is True."""
        kept = alive.nonzero().squeeze(1)
        # Layers with a recurrent state can be put in another order alone, and caches of a model's own class selected.
        has_states = any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)
        (self.cache.reorder_cache if has_states else self.cache.batch_select_indices)(kept)
        self.mask, self.rows, self.positions = self.mask[kept], self.rows[kept], self.positions[kept]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    sampling: Sampling,
    key: RandomKey,
    eos_ids: frozenset[int],
    pad_id: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rollout:
    """Sample `num_samples` responses to each prompt, all in one batch.

    Raises:
        GenerationStopped: `should_stop` answered True between two decode steps.
    """
    device = next(model.parameters()).device
    repeated = [prompt for prompt in prompts for _ in range(num_samples)]
    rows = [torch.as_tensor(prompt.ids, dtype=torch.int64, device=device) for prompt in repeated]
    prompt_ids = torch.tensor([prompt.prompt_id for prompt in repeated], dtype=torch.int64, device=device)
    sample_index = torch.arange(len(rows), device=device) % num_samples
    uniform = rollout_uniforms(key, prompt_ids, sample_index, sampling.max_new_tokens)
    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=device)
    tokens_by_row = prompt_ids.new_full(uniform.shape, pad_id)
    log_probs_by_row = torch.zeros(uniform.shape, device=device)
    lengths, finished = torch.zeros_like(prompt_ids), torch.zeros_like(prompt_ids, dtype=torch.bool)
    batch = Decoder(model, rows, pad_id)
    for position in range(sampling.max_new_tokens):
        if should_stop():
            raise GenerationStopped
        here, scaled = batch.rows, batch.logits / sampling.temperature
        known = scaled[:, : sampling.num_tokens]
        tokens = draw(truncate(known, top_p=sampling.top_p, top_k=sampling.top_k), uniform[here, position])
        # Rows that have finished but not left the batch are written behind their ends.
        tokens_by_row[here, position] = tokens
        log_probs_by_row[here, position] = gather_log_probs(scaled, tokens)
        lengths[here] += ~finished[here]
        finished[here] |= torch.isin(tokens, eos)
        alive = ~finished[here]
        if position + 1 == sampling.max_new_tokens or not (num_alive := int(alive.sum())):
            break
        if len(here) - num_alive >= COMPACT_ABOVE * len(here):
            batch.keep(alive)
            tokens = tokens[alive]
        batch.advance(tokens)
    ends = lengths.tolist()
    responses, log_probs = (
        [row[:end] for row, end in zip(values, ends, strict=True)] for values in (tokens_by_row, log_probs_by_row)
    )
    return Rollout(rows, responses, log_probs, finished, prompt_ids, sample_index)


def generate_batches(model: nn.Module, prompts: Sequence[Prompt], *, batch_size: int, **settings: Any) -> Rollout:
    """Call `generate` on `batch_size` prompts after the other, and join the results to one rollout."""
    parts = [
        generate(model, prompts[start : start + batch_size], **settings) for start in range(0, len(prompts), batch_size)
    ]
    return Rollout(
        prompts=[row for part in parts for row in part.prompts],
        responses=[row for part in parts for row in part.responses],
        log_probs=[row for part in parts for row in part.log_probs],
        finished=torch.cat([part.finished for part in parts]),
        prompt_ids=torch.cat([part.prompt_ids for part in parts]),
        sample_index=torch.cat([part.sample_index for part in parts]),
    )
