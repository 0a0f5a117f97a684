"""The prompts of a run, those that each rollout takes, and the sampling of responses on all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline import dist
from pipeline.configuration.groups import DataConfig
from pipeline.data.batching import SFTBatch, num_steps, packed_sft_batch, rank_slices, rows_of_step
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling
from pipeline.run.run import Run
from pipeline.training.inputs import prepare_data
from pipeline.training.steps import Interrupted
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Responses, gather_responses, pack_responses

# What a model's generation_config.json may ask of transformers' `generate`, besides ids of tokens.
SAMPLING_SETTINGS = frozenset(
    "do_sample temperature top_p top_k min_p typical_p repetition_penalty num_beams length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size".split()
)


def make_prompts(config: PPOConfig, tokenizer: Any) -> StageData:
    """Read the prompts to train on, and the held-out ones."""
    return prepare_data("ppo", config.data, tokenizer=tokenizer)


def make_text(run: Run, config: PPOConfig, tokenizer: Any) -> StepLoader[SFTBatch] | None:
    """Read blocks of plain text for the ptx loss, as many per optimizer step as responses; None without the flag."""
    if not config.data.unsupervised_data_path:
        return None
    source = DataConfig(
        data_path=config.data.unsupervised_data_path,
        mixture=config.data.mixture,
        eval_fraction=0.0,
        data_output_path=config.data.data_output_path,
    )
    length = config.data.max_prompt_seq_len + config.sampling.max_answer_seq_len
    built = prepare_data("text", source, tokenizer=tokenizer, max_seq_len=length)
    return StepLoader(
        built.train,
        [[row] for row in range(len(built.train))],
        lambda packs: packed_sft_batch(packs, pad_id=tokenizer.pad_token_id),
        micro_batch_size=config.optimizer.per_device_train_batch_size,
        accumulation=config.optimizer.gradient_accumulation_steps,
        world_size=run.world.size,
        rank=run.world.rank,
        seed=config.run.seed,
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The arithmetic of a PPO run, counted over all ranks; a row is a sampled response.

    num_rollouts: None where `--max_steps` decides.
    """

    prompts_per_rollout: int
    rows_per_step: int
    steps_per_rollout: int
    rollouts_per_epoch: int
    total_steps: int
    num_rollouts: int | None

    def is_done(self, *, step: int, rollout: int) -> bool:
        """Tell whether the run ends: after `--max_steps`, else after the epochs.

        Rollouts that `--approx_kl_stop` cut short count like others.
        """
        return step >= self.total_steps or (self.num_rollouts is not None and rollout >= self.num_rollouts)

    def prompts(self, *, seed: int, rollout: int, num_prompts: int) -> tuple[int, list[int | None]]:
        """Return (epoch, prompt rows) of a rollout; None is padding of an epoch's last rollout."""
        epoch, within = divmod(rollout, self.rollouts_per_epoch)
        return epoch, rows_of_step(seed, epoch, within, num_prompts, self.prompts_per_rollout)


def make_schedule(config: PPOConfig, *, num_prompts: int, world_size: int) -> Schedule:
    """Count a run's rollouts and steps; that they divide evenly is checked in the configuration."""
    sampling, optimizer = config.sampling, config.optimizer
    prompts = sampling.per_device_generation_batch_size * sampling.generation_batches * world_size
    rows = prompts * sampling.num_samples_per_prompt
    per_step = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * world_size
    steps = rows // per_step * config.ppo.ppo_epochs
    per_epoch = num_steps(num_prompts, prompts)
    rollouts = max(1, math.ceil(config.run.num_train_epochs * per_epoch))
    limit = config.run.max_steps
    return Schedule(prompts, per_step, steps, per_epoch, limit or rollouts * steps, None if limit else rollouts)


def sampling_line(config: PPOConfig, eos_ids: Iterable[int], generation_config: Mapping[str, Any]) -> str:
    """Return the values that responses are sampled with, and those of the model's folder that are not used."""
    sampling, num_samples = config.sampling, config.sampling.num_samples_per_prompt
    ends = ", ".join(map(str, sorted(eos_ids)))
    unused = [f"{name} {value}" for name, value in generation_config.items() if name in SAMPLING_SETTINGS]
    return (
        f"sampling: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}, "
        f"no other filter; at most {sampling.max_answer_seq_len} tokens, ended by id {ends}; "
        f"{'one response' if num_samples == 1 else f'{num_samples} responses'} per prompt"
        + (f"; not used of generation_config.json: {', '.join(unused)}" if unused else "")
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling of responses to rows of a prompt data set on all ranks.

    batch_size: prompts generated at once on one rank. max_prompt: tokens of the longest prompt.
    """

    hybrid: HybridEngine
    rows: Any
    world: dist.World
    sampling: Sampling
    num_samples: int
    batch_size: int
    max_prompt: int
    should_stop: Callable[[], bool]

    def sample(self, rows: Sequence[int | None], key: RandomKey) -> Responses:
        """Sample `num_samples` responses to each of the rows (None: padding); all ranks get all. A collective.

        Raises:
            Interrupted: on all ranks, where `should_stop` answered True on any between two tokens.
        """
        group = self.hybrid.group
        places = self._places(len(rows))
        stopped = False
        with self.hybrid.generation():
            try:
                mine = self._sample_places(rows, places, key)
            except GenerationStopped:
                stopped = True
        if dist.max_over_ranks(float(stopped), self.world.device):
            raise Interrupted
        if group.size > 1:
            # All ranks of the group hold the same responses; each contributes its part of them.
            index = torch.arange(len(mine.order), device=mine.order.device)
            mine = mine.select(index.chunk(group.size)[group.rank])
        return gather_responses([mine])

    def _places(self, num_prompts: int) -> list[int | None]:
        """The places among the rollout's prompts that this rank's group samples, batch by batch; None is padding."""
        size = self.hybrid.group.size
        batches = rank_slices(
            list(range(num_prompts)), self.world.size // size, self.world.rank // size, self.batch_size * size
        )
        return [place for batch in batches for place in batch]

    def _sample_places(self, rows: Sequence[int | None], places: Sequence[int | None], key: RandomKey) -> Responses:
        chosen = [None if place is None else rows[place] for place in places]
        rollout = self.hybrid.generate(
            [self._prompt(row or 0) for row in chosen],
            num_samples=self.num_samples,
            sampling=self.sampling,
            key=key,
            batch_size=self.batch_size * self.hybrid.group.size,
            should_stop=self.should_stop,
        )
        device = rollout.finished.device
        # Places beyond the prompts come from rounding up to whole batches; they sort to the end.
        last = len(rows)
        order = torch.tensor([last if place is None else place for place in places], device=device)
        samples = torch.arange(self.num_samples, device=device)
        return pack_responses(
            rollout,
            pad_id=self.hybrid.pad_id,
            max_sequence=self.max_prompt + self.sampling.max_new_tokens,
            max_response=self.sampling.max_new_tokens,
            valid=torch.tensor([row is not None for row in chosen], device=device).repeat_interleave(self.num_samples),
            row_index=torch.tensor([row or 0 for row in chosen], device=device).repeat_interleave(self.num_samples),
            order=(order.unsqueeze(1) * self.num_samples + samples).flatten(),
        )

    def _prompt(self, row: int) -> Prompt:
        prompt = self.rows[row]
        return Prompt(prompt["prompt_ids"], prompt["prompt_id"])
