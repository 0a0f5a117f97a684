"""The eager backend: sampling with the forward pass of transformers, for CPUs and models that no other supports.

Finished rows leave their batch, but none joins it: other requests wait until the whole batch has ended, and those that
stream start in a further batch if slots are free. N rows, P longest prompt, T longest response, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from pipeline.generation.rollouts import GenerationStopped, Truncation, Vocabulary, draw, rollout_uniforms
from pipeline.generation.session import Capacity, Finished, Reason, Request, Session, Tokens, new_events
from pipeline.tensor_ops import gather_log_probs, lengths_to_mask, pad_rows, position_ids_from_mask

# Share of the batch that must have finished before its rows are removed. Removal copies the KV cache; without it,
# decode steps compute rows that have ended. Chosen by hand.
COMPACT_ABOVE = 0.25


class Decoder:
    """The rows that are still being generated, n of the N of a batch.

    model: a causal language model of transformers.
    mask: (n, P + t) bool, True = real token; the prompts are padded on the left.
    rows: (n,) int64, indices of these rows among the N.
    cache: KV cache of transformers.
    logits: (n, V) fp32, logits of the next tokens.
    positions: (n,) int64, position ids of the next tokens.
    """

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
        """Append one token (n,) to each row and compute the next logits."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = self._forward(tokens.unsqueeze(1), self.positions.unsqueeze(1))
        self.positions = self.positions + 1

    def keep(self, alive: torch.Tensor) -> None:
        """Remove all rows but those where `alive` (N,) is True."""
        rows = alive.nonzero().squeeze(1)
        # Layers with a recurrent state can only be reordered; caches of a model's own class can only be selected from.
        has_states = any(isinstance(layer, LinearAttentionLayer) for layer in self.cache.layers)
        (self.cache.reorder_cache if has_states else self.cache.batch_select_indices)(rows)
        self.mask, self.rows, self.positions = self.mask[rows], self.rows[rows], self.positions[rows]


class Batch:
    """The N requests of a batch, their settings and responses. Rows that left the decoder stay in these tensors.

    vocabulary: ids that end a response or pad it, and those that can be drawn.
    truncation: union of what the rows need.
    temperature, top_p: (N,) fp32, settings of each row.
    top_k: (N,) int64.
    uniforms: (N, T) float64, random numbers of all positions.
    eos: int64 ids that end a response.
    tokens: (N, T) int64, tokens drawn.
    log_probs: (N, T) fp32, their log-probabilities.
    running: row -> its request, of responses that have not ended.
    decoder: forward passes of the rows that run, and of a few that have ended.
    position: tokens drawn so far.
    """

    def __init__(self, model: nn.Module, requests: Sequence[Request], vocabulary: Vocabulary) -> None:
        device = next(model.parameters()).device
        self.vocabulary = vocabulary
        shape = (len(requests), max(request.sampling.max_new_tokens for request in requests))
        self.truncation = Truncation.of(request.sampling for request in requests)
        drawn_with = [request.sampling.drawn_with for request in requests]
        self.temperature, self.top_p, top_k = torch.tensor(drawn_with, dtype=torch.float32, device=device).T
        self.top_k = top_k.long()
        self.uniforms = uniforms_of(requests, shape[1], device)
        self.eos = torch.tensor(sorted(vocabulary.eos_ids), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.running = dict(enumerate(requests))
        rows = [torch.as_tensor(request.prompt.ids, dtype=torch.int64, device=device) for request in requests]
        self.decoder, self.position = Decoder(model, rows, vocabulary.pad_id), 0

    def step(self) -> list[Tokens | Finished]:
        """Draw the next token of each row, and compute the logits of the one after it; report what is new."""
        here, position = self.decoder.rows, self.position
        scaled = self.decoder.logits / self.temperature[here].unsqueeze(1)
        remaining = self.truncation.apply(scaled[:, : self.vocabulary.num_tokens], self.top_p[here], self.top_k[here])
        tokens = draw(remaining, self.uniforms[here, position])
        # Rows that have ended but are still in the batch write tokens behind their ends; nothing reads them.
        self.tokens[here, position] = tokens
        self.log_probs[here, position] = gather_log_probs(scaled, tokens)
        self.position += 1
        rows = here.tolist()
        events = self._report(dict(zip(rows, torch.isin(tokens, self.eos).tolist(), strict=True)))
        alive = [row in self.running for row in rows]
        if any(alive):
            if alive.count(False) >= COMPACT_ABOVE * len(rows):
                remaining = torch.tensor(alive, device=tokens.device)
                self.decoder.keep(remaining)
                tokens = tokens[remaining]
            self.decoder.advance(tokens)
        return events

    def _report(self, is_end: dict[int, bool]) -> list[Tokens | Finished]:
        """Return new events of the running rows, and remove from `running` those that have ended."""
        events: list[Tokens | Finished] = []
        for row, request in list(self.running.items()):
            is_at_limit = self.position == request.sampling.max_new_tokens
            reason: Reason | None = "end" if is_end[row] else "limit" if is_at_limit else None
            if reason or request.is_watched:
                ids, log_probs = self.tokens[row, : self.position], self.log_probs[row, : self.position]
                new = new_events(request, ids, log_probs, reason, self.vocabulary)
                events += new
                if new and isinstance(new[-1], Finished):
                    del self.running[row]
        return events


def uniforms_of(requests: Sequence[Request], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the random numbers (N, T) float64 of requests; 0 for greedy ones, which draws the first remaining
    token."""
    uniforms = torch.zeros(len(requests), num_tokens, dtype=torch.float64, device=device)
    for key in dict.fromkeys(request.key for request in requests):
        rows = [n for n, request in enumerate(requests) if request.key == key and not request.sampling.is_greedy]
        counters = [(requests[n].prompt.prompt_id, requests[n].sample) for n in rows]
        if rows:
            prompt_ids, samples = torch.tensor(counters, dtype=torch.int64, device=device).T
            uniforms[rows] = rollout_uniforms(key, prompt_ids, samples, num_tokens)
    return uniforms


class EagerSession(Session):
    """A session that runs its requests batch after batch; of those that stream, several batches at a time."""

    def __init__(self, model: nn.Module, capacity: Capacity, vocabulary: Vocabulary) -> None:
        super().__init__(capacity, vocabulary, next(model.parameters()).device)
        self.model = model
        self.batches: list[Batch] = []

    @torch.no_grad()
    def advance(self, *, stop: bool = False) -> list[Tokens | Finished]:
        """Draw a token of each row of the batches that run, and of the next one; see `Session`."""
        if stop:
            raise GenerationStopped
        for batch in self.batches:
            batch.running = {row: one for row, one in batch.running.items() if not one.is_withdrawn}
        self.batches = [batch for batch in self.batches if batch.running]
        num_free = self.capacity.num_slots - sum(len(batch.running) for batch in self.batches)
        if not self.batches or (self.waiting and self.waiting[0].streams):
            requests = [self.waiting.popleft() for _ in range(min(num_free, len(self.waiting)))]
            self.batches += [Batch(self.model, requests, self.vocabulary)] if requests else []
        events = [event for batch in self.batches for event in batch.step()]
        self.batches = [batch for batch in self.batches if batch.running]
        self.is_idle = not self.batches and not self.waiting
        return events


class EagerGenerator:
    """A source of sessions over a model of transformers, as it is."""

    def __init__(self, model: nn.Module, vocabulary: Vocabulary) -> None:
        self.model, self.vocabulary = model, vocabulary

    def session(self, capacity: Capacity) -> EagerSession:
        """Open a session of this capacity."""
        return EagerSession(self.model, capacity, self.vocabulary)
