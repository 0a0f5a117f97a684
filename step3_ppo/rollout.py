"""The prompts of a run, those that each rollout takes, the sampling of responses on all ranks, and their metrics."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.data.batching import SFTBatch, num_steps, packed_sft_batch, rank_slices, rows_of_step, total_steps
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.errors import Interrupted
from pipeline.files import tolerated
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling
from pipeline.run.run import Run
from pipeline.tensor_ops import masked_sum, moments
from pipeline.training.inputs import prepare_stage
from pipeline.training.metrics import finite
from step3_ppo.config import PPOConfig
from step3_ppo.estimators import explained_variance
from step3_ppo.experience import Experience, Responses, Rewarded, Scores, gather_responses, pack_responses

if TYPE_CHECKING:  # it imports deepspeed, which a plan does without
    from pipeline.generation.hybrid_engine import HybridEngine

# Settings of transformers' `generate` in a model's generation_config.json, besides ids of tokens.
SAMPLING_SETTINGS = frozenset(
    "do_sample temperature top_p top_k min_p typical_p repetition_penalty num_beams length_penalty max_length "
    "max_new_tokens min_length no_repeat_ngram_size".split()
)
EMPTY_WARNING = 0.5  # share of responses without a word above which the log says so
# Nats per sequence: no KL is negative, and an estimate of its mean this far below 0 is more than a sampling error.
NEGATIVE_KL_WARNING = -1.0
# Nats, of the one token of a rollout that differs most; chosen by hand: benchmarks in bf16 report up to 0.18.
SAMPLER_ERROR_WARNING = {torch.float32: 0.05, torch.float16: 1.0, torch.bfloat16: 1.0}

log = logging.getLogger(__name__)


def make_data(
    run: Run, config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[StageData, StepLoader[SFTBatch] | None]:
    """Read the prompts; and blocks of plain text for the ptx loss, as many per optimizer step as responses."""
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
    """The arithmetic of a PPO run, counted over all ranks; a row is a sampled response.

    prompts_per_rollout: prompts of a rollout.
    prompts_at_once: prompts that a rank samples at once.
    rows_per_step: rows of an optimizer step.
    steps_per_rollout: optimizer steps of a rollout, all PPO epochs.
    rollouts_per_epoch: rollouts in which each prompt is used once.
    total_steps: optimizer steps of the run.
    num_rollouts: rollouts of the run; None where `--max_steps` decides.
    """

    prompts_per_rollout: int
    prompts_at_once: int
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
    """Collect what the flags say of generation on so many ranks."""
    sampling = config.sampling
    return GenerationOptions(
        backend=sampling.generation_engine,
        merge_lora=sampling.merge_lora_for_generation,
        max_sequence_length=config.max_sequence_length,
        # Optimizer states that come back for the update need the memory that the cache had.
        release_cache=sampling.release_inference_cache or sampling.offload_optimizer_during_rollout,
        tensor_parallel_size=sampling.inference_tp_size,
        weights=sampling.rollout_weights,
        min_slots=max(
            config.rollout_size(ranks).at_once * sampling.num_samples_per_prompt,
            config.optimizer.per_device_eval_batch_size,
        ),
    )


def sampling_line(config: PPOConfig, eos_ids: Iterable[int], generation_config: Mapping[str, Any]) -> str:
    """Return the values that responses are sampled with, and those of the model's folder that are not used."""
    sampling, num_samples = config.sampling, config.sampling.num_samples_per_prompt
    ends = ", ".join(map(str, sorted(eos_ids))) + "".join(f" or {text!r}" for text in sampling.stop_strings)
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

    hybrid: engine that generates.
    rows: prompt data set.
    world: ranks and device.
    sampling: length, temperature and truncation.
    num_samples: responses to a prompt.
    batch_size: prompts generated at once on one rank.
    max_prompt: tokens of the longest prompt.
    should_stop: says between two tokens whether to stop.
    """

    hybrid: "HybridEngine"
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
        return gather_responses(mine)

    def _places(self, num_prompts: int) -> list[int | None]:
        """The places among a rollout's prompts for this rank's group, in batches, the last smaller; None is padding."""
        size, ranks = self.hybrid.group.size, self.world.size
        of_group = partial(rank_slices, world_size=ranks // size, rank=self.world.rank // size)
        num_whole = num_prompts - num_prompts % (ranks * self.batch_size)
        rest = range(num_whole, num_prompts)
        batches = of_group(range(num_whole), micro_batch_size=self.batch_size * size)
        batches += of_group(rest, micro_batch_size=max(1, -(-len(rest) // ranks)) * size)
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
            pad_id=self.hybrid.vocabulary.pad_id,
            max_sequence=self.max_prompt + self.sampling.max_new_tokens,
            max_response=self.sampling.max_new_tokens,
            valid=torch.tensor([row is not None for row in chosen], device=device).repeat_interleave(self.num_samples),
            row_index=torch.tensor([row or 0 for row in chosen], device=device).repeat_interleave(self.num_samples),
            order=(order.unsqueeze(1) * self.num_samples + samples).flatten(),
        )

    def _prompt(self, row: int) -> Prompt:
        prompt = self.rows[row]
        return Prompt(prompt["prompt_ids"], prompt["prompt_id"])


def rollout_metrics(responses: Responses, scores: Scores, rewarded: Rewarded) -> dict[str, float]:
    """Compute the objective, completion, value and advantage metrics of a whole rollout (all ranks hold all rows).

    NaN where no row counts: it is logged as null.
    """
    valid, mask = rewarded.valid, rewarded.experience.response_mask
    kl, kl_k3 = (torch.where(mask, kl, 0.0).sum(1) for kl in (rewarded.kl, rewarded.kl_k3))
    finished = responses.finished.float()
    found = policy_metrics(responses, scores, mask) | value_metrics(rewarded.experience)
    return found | {
        "objective/kl": mean_of(kl, valid),
        "objective/kl_k3": mean_of(kl_k3, valid),
        "objective/scores": mean_of(rewarded.scores, valid),
        "objective/score_clipfrac": mean_of(rewarded.clipped.float(), valid),
        "objective/rlhf_reward": mean_of(rewarded.total_rewards, valid),
        "advantages/mean": rewarded.advantage_mean if mask.any() else math.nan,
        "advantages/std": rewarded.advantage_std if mask.any() else math.nan,
        "completions/mean_length": mean_of(responses.response_lengths.float(), valid),
        "completions/truncated_fraction": mean_of(1.0 - finished, valid),
        "completions/eos_fraction": mean_of(finished, valid),
        "completions/empty_fraction": mean_of((responses.response_lengths == 1) * finished, valid),
        "rows_masked": float((responses.valid & ~valid).sum()),
    }


def warn_of_rollout(metrics: dict[str, float], *, step: int, dtype: torch.dtype) -> None:
    """Log what a healthy policy's rollout does not show, and at the first step one that another policy has sampled."""
    if not step:
        warn_of_sampler(metrics, dtype=dtype)
    if metrics["completions/empty_fraction"] > EMPTY_WARNING:
        log.warning("step %d: most responses are an EOS alone: the policy answers nothing", step)
    if metrics["objective/kl"] < NEGATIVE_KL_WARNING:
        log.warning(
            "step %d: the mean KL is negative, %.2f nats per sequence: responses are not sampled from the policy that "
            "scores them; look at --top_p and --top_k (1 and 0 change nothing) and at policy/sampler_error",
            step,
            metrics["objective/kl"],
        )


def warn_of_sampler(metrics: dict[str, float], *, dtype: torch.dtype) -> None:
    """Log that the first rollout's log-probabilities are not those of the policy that is trained."""
    if (error := metrics.get("policy/sampler_error", 0.0)) > SAMPLER_ERROR_WARNING[dtype]:
        log.warning(
            "step 0: sampler and trainer differ by %.2f nats in a token's log-probability (policy/sampler_error), more "
            "than rounding makes: they do not compute the same model; try another --generation_engine, and give "
            "--old_log_probs trainer",
            error,
        )


def mean_of(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean of the values that count; NaN where none does."""
    return (masked_sum(values, mask) / mask.sum()).item()


def policy_metrics(responses: Responses, scores: Scores, mask: torch.Tensor) -> dict[str, float]:
    """Return the metrics of the trainer's pass over the rollout; {} where it is left to the update's own pass."""
    if scores.entropy is None:
        return {}
    sampler_error = torch.where(mask, (responses.sampler_log_probs - scores.log_probs).abs(), 0.0).max()
    return {
        "objective/entropy": mean_of(scores.entropy, mask),
        "policy/sampler_error": sampler_error.item() if mask.any() else math.nan,
    }


def value_metrics(experience: Experience) -> dict[str, float]:
    """Return the metrics of the critic before the updates; {} without one."""
    if (targets := experience.targets) is None:
        return {}
    mask = experience.response_mask
    errors = moments(targets.returns - targets.values, mask)
    return {"value/explained_variance": explained_variance(moments(targets.returns, mask), errors).item()}


def evaluation_metrics(found: dict[str, float], *, num_rows: int) -> dict[str, float]:
    """Keep the metrics that describe a policy on `num_rows` held-out prompts, with the prefix `eval_`."""
    kept = ("objective/", "completions/")
    return {f"eval_{name}": value for name, value in found.items() if name.startswith(kept)} | {"eval_rows": num_rows}


def append_samples(
    path: Path, *, step: int, responses: Responses, rewarded: Rewarded, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Add the responses of an evaluation on this rank to samples.jsonl."""
    lines = []
    for n in range(len(responses.sequences)):
        if not responses.valid[n]:
            continue
        start, length = int(responses.prompt_lengths[n]), int(responses.response_lengths[n])
        row = {
            "step": step,
            "prompt": tokenizer.decode(responses.sequences[n, :start], skip_special_tokens=True),
            "response": tokenizer.decode(responses.sequences[n, start : start + length], skip_special_tokens=True),
            "score": finite(round(rewarded.scores[n].item(), 4)),
            "kl": round(rewarded.kl[n].sum().item(), 4) if rewarded.valid[n] else None,
            "tokens": length,
            "finished": bool(responses.finished[n]),
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with tolerated("samples"), path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
