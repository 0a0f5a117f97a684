"""Read the prompts of a run, schedule them over rollouts, and sample responses on all ranks."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.data.batching import SFTBatch, epoch_order, num_steps, packed_sft_batch, rank_slices, total_steps
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.data.templates import set_template
from pipeline.data.tool_turns import ToolTurns
from pipeline.errors import Interrupted
from pipeline.generation.episodes import Episode, NoAnswers
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling
from pipeline.inference.tool_conversations import Talk, ToolUse
from pipeline.preparation.inputs import prepare_stage
from pipeline.rewards.rollout import EndedResponse, FunctionCalls
from pipeline.rewards.tool_flags import check_rewarded
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Responses, gather_responses, pack_responses

if TYPE_CHECKING:  # this imports deepspeed, which a plan does not need
    from step3_ppo.models.hybrid_engine import HybridEngine

log = logging.getLogger(__name__)

MAX_ROUNDS = 3  # rounds of further prompts in the place of those whose responses all have the same reward
# Names of the settings in a model's generation_config.json that change how transformers' `generate` samples.
SAMPLING_SETTINGS = frozenset(
    "do_sample temperature top_p top_k min_p typical_p repetition_penalty num_beams length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size".split()
)


def make_data(
    run: Run, config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[StageData, StepLoader[SFTBatch] | None]:
    """Read the prompts, and for the ptx loss blocks of plain text, as many per optimizer step as responses.

    Raises InputError, see `prepare_stage`, and `ToolTurns` for a chat template that takes no tools.
    """
    if config.tool_schemas:
        set_template(tokenizer, config.data.template)
        ToolTurns(tokenizer, json.loads(config.tool_schemas))
        check_rewarded(config.tools, config.rewards, others=bool(config.has_reward_model or config.reward_functions))
    prompts, *texts = prepare_stage(run, config, tokenizer)
    if not texts:
        return prompts, None
    blocks = texts[0].train
    loader = StepLoader(
        blocks,
        [[row] for row in range(len(blocks))],
        lambda packs: packed_sft_batch(packs, pad_id=tokenizer.pad_token_id),
        micro_batch_size=config.optimizer.per_device_train_batch_size,
        accumulation=config.optimizer.gradient_accumulation_steps,
        world_size=run.world.size,
        rank=run.world.rank,
        seed=config.run.seed,
    )
    return prompts, loader


@dataclass(frozen=True, slots=True)
class Schedule:
    """The numbers of prompts, rows and steps of a PPO run, over all ranks; a row is a sampled response.

    prompts_per_rollout: prompts of a rollout.
    prompts_at_once: prompts that a rank samples at once.
    rows_per_step: rows of an optimizer step.
    steps_per_rollout: optimizer steps of a rollout, all PPO epochs.
    rollouts_per_epoch: rollouts in which each prompt is used once.
    total_steps: optimizer steps of the run.
    num_rollouts: rollouts of the run; None if `--max-steps` ends it.
    """

    prompts_per_rollout: int
    prompts_at_once: int
    rows_per_step: int
    steps_per_rollout: int
    rollouts_per_epoch: int
    total_steps: int
    num_rollouts: int | None

    @property
    def positions_per_epoch(self) -> int:
        """Positions in an epoch's order of prompts; those after its last prompt are padding of a rollout."""
        return self.rollouts_per_epoch * self.prompts_per_rollout

    def is_done(self, *, step: int, position: int) -> bool:
        """Return True if the run ends: after `--max-steps`, else after its epochs.

        Rollouts whose last steps are padding, and are not taken, count like others.

        Args:
            position: position of the next rollout's first prompt in the order of all epochs.
        """
        ends = self.num_rollouts is not None and position >= self.num_rollouts * self.prompts_per_rollout
        return step >= self.total_steps or ends

    def prompts(self, position: int, count: int, *, seed: int, num_prompts: int) -> tuple[RandomKey, list[int | None]]:
        """Return (key of the epoch, `count` prompt rows) from a position on; None is padding after its last prompt."""
        epoch, first = divmod(position, self.positions_per_epoch)
        rows = epoch_order(seed, epoch, num_prompts)[first : first + count].tolist()
        return RandomKey(seed, "rollout", epoch), rows + [None] * (count - len(rows))

    def position_after(self, position: int, count: int, *, num_prompts: int) -> int:
        """Return the position after `count` prompts from `position` on: the next epoch's first after the last one."""
        first = position % self.positions_per_epoch
        is_last = first + count >= num_prompts
        return position - first + self.positions_per_epoch if is_last else position + count


def make_schedule(config: PPOConfig, *, num_prompts: int, world_size: int) -> Schedule:
    """Count a run's rollouts and steps. The configuration has checked that they divide evenly."""
    size, limit = config.rollout_size(world_size), config.run.max_steps
    rollouts = total_steps(num_prompts, size.prompts, epochs=config.run.num_train_epochs, max_steps=0)
    per_epoch, total = num_steps(num_prompts, size.prompts), limit or rollouts * size.steps
    counts = (size.prompts, size.at_once, size.step_rows, size.steps)
    return Schedule(*counts, per_epoch, total, None if limit else rollouts)


def make_sampling(config: PPOConfig) -> Sampling:
    """Return the settings of rollouts."""
    sampling = config.sampling
    return Sampling(
        max_new_tokens=sampling.max_answer_seq_len,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=tuple(sampling.stop_strings),
    )


def generation_options(config: PPOConfig, ranks: int) -> GenerationOptions:
    """Return the options of generation that the flags give on this number of ranks."""
    sampling = config.sampling
    return GenerationOptions(
        backend=sampling.generation_engine,
        merge_lora=sampling.merge_lora_for_generation,
        max_sequence_length=config.max_sequence_length,
        # The cache must free its memory for the optimizer states that return to the device for the update.
        release_cache=sampling.release_inference_cache or sampling.offload_optimizer_during_rollout,
        tensor_parallel_size=sampling.inference_tp_size,
        weights=sampling.rollout_weights,
        min_slots=max(config.rollout_size(ranks).slots, config.optimizer.per_device_eval_batch_size),
    )


def sampling_line(config: PPOConfig, eos_ids: Iterable[int], generation_config: Mapping[str, Any]) -> str:
    """Return a line with the sampling settings, and with those of the model's folder that are ignored."""
    sampling, num_samples = config.sampling, config.sampling.num_samples_per_prompt
    ends = ", ".join(map(str, sorted(eos_ids))) + "".join(f" or {text!r}" for text in sampling.stop_strings)
    unused = [f"{name} {value}" for name, value in generation_config.items() if name in SAMPLING_SETTINGS]
    return (
        f"sampling: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}, "
        f"no other filter; at most {sampling.max_answer_seq_len} tokens, ended by id {ends}; "
        f"{'one response' if num_samples == 1 else f'{num_samples} responses'} per prompt"
        + (f"; ignored in generation_config.json: {', '.join(unused)}" if unused else "")
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling of responses to rows of a prompt data set on all ranks.

    hybrid: engine that generates.
    rows: prompt data set.
    world: ranks and device.
    sampling: length, temperature and truncation.
    num_samples: responses to a prompt.
    batch_size: prompts generated at once on one rank.
    max_prompt: tokens of the longest prompt.
    should_stop: called between two tokens; True stops the sampling.
    calls: starts the calls of reward functions for responses that have ended; None: there are none.
    tools: what responses may call; None: nothing.
    """

    hybrid: "HybridEngine"
    rows: Any
    world: dist.World
    sampling: Sampling
    num_samples: int
    batch_size: int
    max_prompt: int
    should_stop: Callable[[], bool]
    calls: FunctionCalls | None = None
    tools: ToolUse | None = None

    def sample(self, rows: Sequence[int | None], key: RandomKey) -> Responses:
        """Sample `num_samples` responses to each of the rows (None: padding); all ranks get all. A collective.

        Raises:
            Interrupted: on all ranks, if `should_stop` returned True on any, or with the error of the user's tools.
        """
        group = self.hybrid.group
        indices = self._prompt_indices(len(rows))
        interruption = None
        with self.hybrid.generation():
            try:
                mine = self._sample_prompts(rows, indices, key)
            except Interrupted as stop:
                interruption = stop
        if self.tools is not None:
            dist.meet()  # tools may take longer than the time limit of a collective
        if dist.max_over_ranks(float(interruption is not None), self.world.device):
            reports = dist.gather_objects(interruption)
            raise next((one for one in reports if one is not None and one.error), Interrupted())
        if group.size > 1:
            # All ranks of the group have the same responses; each contributes its part.
            index = torch.arange(len(mine.order), device=mine.order.device)
            mine = mine.select(index.chunk(group.size)[group.rank])
        return gather_responses(mine)

    def _contributed(self, count: int) -> range:
        """Return the part of its group's prompts, by index, that this rank contributes."""
        size, rank = self.hybrid.group.size, self.hybrid.group.rank
        return range(count * rank // size, count * (rank + 1) // size)

    def _prompt_indices(self, num_prompts: int) -> list[int | None]:
        """Return the indices of the rollout's prompts that this rank's group samples; None is padding.

        The prompts are dealt in batches, of which the last may be smaller.
        """
        size, ranks = self.hybrid.group.size, self.world.size
        of_group = partial(rank_slices, world_size=ranks // size, rank=self.world.rank // size)
        num_whole = num_prompts - num_prompts % (ranks * self.batch_size)
        rest = range(num_whole, num_prompts)
        batches = of_group(range(num_whole), micro_batch_size=self.batch_size * size)
        batches += of_group(rest, micro_batch_size=max(1, -(-len(rest) // ranks)) * size)
        return [index for batch in batches for index in batch]

    def _sample_prompts(self, rows: Sequence[int | None], indices: Sequence[int | None], key: RandomKey) -> Responses:
        chosen = [None if index is None else rows[index] for index in indices]

        def ended(episode: Episode) -> None:
            index = episode.number // self.num_samples
            row = chosen[index]
            if self.calls is not None and row is not None and index in self._contributed(len(indices)):
                response = EndedResponse(episode.turns[0]) if talk is None else talk.response(episode)
                self.calls.ended(row, episode.sample, response)

        talk: Talk | None = None
        if self.tools is not None:
            talk = Talk(self.tools, self.rows, chosen, self.num_samples, self.should_stop, note=ended)
        try:
            rollout = self.hybrid.generate(
                [self._prompt(row or 0) for row in chosen] if talk is None else talk.prompts(),
                num_samples=self.num_samples,
                sampling=self.sampling,
                key=key,
                batch_size=self.batch_size * self.hybrid.group.size,
                should_stop=self.should_stop if talk is None else talk.stops,
                answers=talk or NoAnswers(ended),
            )
        except GenerationStopped:
            raise Interrupted(talk.error if talk is not None else None) from None
        device = rollout.finished.device
        # Padding comes from rounding up to whole batches; it sorts to the end.
        last = len(rows)
        order = torch.tensor([last if index is None else index for index in indices], device=device)
        samples = torch.arange(self.num_samples, device=device)
        return pack_responses(
            rollout,
            pad_id=self.hybrid.vocabulary.pad_id,
            max_sequence=self.max_prompt + self.sampling.max_new_tokens,
            max_response=self.sampling.max_new_tokens,
            valid=torch.tensor([row is not None for row in chosen], device=device).repeat_interleave(self.num_samples),
            row_index=torch.tensor([row or 0 for row in chosen], device=device).repeat_interleave(self.num_samples),
            order=(order.unsqueeze(1) * self.num_samples + samples).flatten(),
            tool_counts=None if talk is None else talk.counts(device),
        )

    def _prompt(self, row: int) -> Prompt:
        prompt = self.rows[row]
        return Prompt(prompt["prompt_ids"], prompt["prompt_id"])


def replace_groups(
    responses: Responses,
    more: Callable[[int], Responses | None],
    is_equal: Callable[[Responses], Tensor],
    *,
    group_size: int,
    pad_id: int,
) -> Responses:
    """Replace groups whose rewards are all equal by groups of further prompts (DAPO, arXiv 2503.14476, section 3.2).

    After `MAX_ROUNDS`, or if no further prompts are left, the remaining ones stay.

    Args:
        more: samples responses to that many further prompts; None if no prompts are left.
        is_equal: responses (N,) -> (N / group_size,) bool, True = replace the group.
    """
    for _ in range(MAX_ROUNDS):
        equal = is_equal(responses).nonzero().flatten()
        added = more(len(equal)) if len(equal) else None
        if added is None:
            break
        # If fewer prompts are left, the last groups stay.
        given = added.valid.view(-1, group_size).any(1).nonzero().flatten()
        both, index = responses.above(added, pad_id), torch.arange(len(responses.order), device=responses.order.device)
        index.view(-1, group_size)[equal[: len(given)]] = len(index) + index.view(-1, group_size)[given]
        responses = replace(both.select(index), order=responses.order)
    return responses


def log_unfinished(responses: Responses, *, rollout: int, limit: int) -> None:
    """Log how many responses of a run's first rollout (number 0) reached `limit` tokens before they ended."""
    if not rollout:
        unfinished = responses.valid & ~responses.finished
        text = "first rollout: %d of %d answers reached the limit of %d tokens before their end (--max-answer-seq-len)"
        log.info(text, unfinished.sum(), responses.valid.sum(), limit)
