"""The arithmetic of a PPO run: prompts, rows, optimizer steps."""

import math
from dataclasses import dataclass

from pipeline.data.batching import num_steps, rows_of_step
from step3_ppo.config import PPOConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts over all ranks. A row is a sampled response; num_rollouts is None where `--max_steps` decides."""

    prompts_per_rollout: int
    rows_per_step: int
    steps_per_rollout: int
    rollouts_per_epoch: int
    total_steps: int
    num_rollouts: int | None

    def is_done(self, *, step: int, rollout: int) -> bool:
        """After `--max_steps`, else after the epochs: rollouts that `--approx_kl_stop` cut short count like others."""
        return step >= self.total_steps or (self.num_rollouts is not None and rollout >= self.num_rollouts)

    def prompts(self, *, seed: int, rollout: int, num_prompts: int) -> tuple[int, list[int | None]]:
        """(epoch, prompt rows) of a rollout; None fills up the last one of an epoch."""
        epoch, within = divmod(rollout, self.rollouts_per_epoch)
        return epoch, rows_of_step(seed, epoch, within, num_prompts, self.prompts_per_rollout)


def make_plan(config: PPOConfig, *, num_prompts: int, world_size: int) -> Plan:
    """The plan of a run; that rollouts divide into whole optimizer steps is checked in the configuration."""
    sampling, optimizer = config.sampling, config.optimizer
    prompts = sampling.per_device_generation_batch_size * sampling.generation_batches * world_size
    rows = prompts * sampling.num_samples_per_prompt
    per_step = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * world_size
    steps = rows // per_step * config.ppo.ppo_epochs
    per_epoch = num_steps(num_prompts, prompts)
    rollouts = max(1, math.ceil(config.run.num_train_epochs * per_epoch))
    limit = config.run.max_steps
    return Plan(prompts, per_step, steps, per_epoch, limit or rollouts * steps, None if limit else rollouts)
