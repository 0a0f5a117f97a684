"""Take an optimizer step of PPO: gradients of the objectives on a minibatch, then all models step, or none does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline import dist
from pipeline.models.forward.shared_prompts import SharedPrompts
from pipeline.random_numbers import permutation
from pipeline.training.micro_batches import Lengths, MicroBatch, micro_batches, row_indices
from pipeline.training.steps import Stopping, step_together
from step3_ppo.experience import Experience, Responses, batch_rows
from step3_ppo.objectives import Objective, StepSize, Sums


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step.

    batches: this rank's micro-batches.
    size: counts over all ranks.
    objectives: objectives that were trained.
    metrics: metrics of the step.
    stepped: False if a loss or gradient was not finite; then no weight has changed.
    """

    batches: Sequence[MicroBatch]
    size: StepSize
    objectives: Sequence[Objective] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    stepped: bool = False

    @property
    def num_tokens(self) -> int:
        """The tokens of the rollout's rows and of the objectives' text, over all ranks."""
        texts = (objective.text for objective in self.objectives)
        return self.size.num_tokens + sum(text.num_tokens for text in texts if text is not None)

    @property
    def flops(self) -> float:
        """The floating-point operations of matrix products over all ranks."""
        return sum(objective.flops(self.size) for objective in self.objectives)


@dataclass(frozen=True, slots=True)
class Updater:
    """The settings of optimizer steps.

    world: ranks and device.
    num_epochs: passes over a rollout.
    rows_per_step: sequences of one optimizer step over all ranks.
    seed: seed of the order of rows in minibatches.
    rate: step -> share of the peak learning rate.
    own_loss: the user's policy loss; None: a built-in one.
    """

    world: dist.World
    num_epochs: int
    rows_per_step: int
    seed: int
    rate: Callable[[int], float]
    own_loss: Callable[..., Tensor] | None = None

    def minibatches(self, lengths: Lengths, size: int, *, rollout: int) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of every optimizer step on rollout number `rollout`, epoch by epoch.

        A micro-batch has at most the tokens of `size` rows that are as long as the longest of its step. The first epoch
        takes the rows in their order; later epochs shuffle them.
        """
        for epoch in range(self.num_epochs):
            rows = list(range(len(lengths)))
            if epoch:
                rows = permutation(len(lengths), seed=self.seed, purpose=f"minibatch/{rollout}", epoch=epoch).tolist()
            yield from micro_batches(rows, lengths, rows_per_step=self.rows_per_step, world=self.world, size=size)

    def step_size(self, responses: Responses, experience: Experience, batches: Sequence[MicroBatch]) -> StepSize:
        """Count the rows and tokens of a step over all ranks. A collective."""
        rows = row_indices(batches, responses.valid.device)
        valid = responses.valid[rows]
        lengths = torch.where(valid, responses.sequence_lengths[rows], 0)
        masks = (responses.response_mask[rows], experience.response_mask[rows])
        counted = (valid, lengths, lengths.square(), *masks, masks[1].any(1))
        parts, prompts = rows.split([len(batch.rows) for batch in batches]), responses.prompt_lengths
        shared = [
            SharedPrompts.of_groups(responses.groups[part], prompts[part], num_tokens=0).lengths * bool(batch.shared)
            for part, batch in zip(parts, batches, strict=True)
        ]
        shared_lengths = torch.where(valid, torch.cat(shared), 0)
        sums = [column.sum().double() for column in (*counted, shared_lengths, shared_lengths.square())]
        return StepSize(*map(int, dist.sum_over_ranks(torch.stack(sums)).tolist()))

    def update(
        self,
        objectives: Sequence[Objective],
        responses: Responses,
        experience: Experience,
        batches: Sequence[MicroBatch],
        *,
        num_tokens: int,
        step: int,
        stopping: Stopping,
    ) -> tuple[dict[str, float], bool]:
        """Take optimizer step number `step` (the first is 0) of all objectives; some row must count. A collective.

        Losses are sums over response tokens divided by `num_tokens`, their number in the whole step on all ranks.

        Returns:
            The metrics, and whether the step was taken: False if a loss or gradient is not finite.

        Raises:
            Interrupted: the run is to stop; the gradients are dropped.
        """
        scale = self.world.size / num_tokens
        # Each engine -> the objective that runs its last backward pass: the one with text, else the last in the list.
        engines = {one.engine: one for one in objectives} | {one.engine: one for one in objectives if one.text}
        sums = Sums()
        for number, (batch, rows, part) in enumerate(batch_rows(responses, batches)):
            stopping.within_step(engines)
            selected = experience.select(rows).narrowed(batch.width)
            for objective in objectives:
                loss = objective.loss(batch, part, selected, sums)
                last = number + 1 == len(batches) and objective.text is None and engines[objective.engine] is objective
                objective.engine.backward(loss * scale, last=last)
        for objective in objectives:
            objective.text_backward(sums)
        totals = sums.over_ranks()
        stepped = step_together(list(engines), self.rate(step), loss=sum(totals[name] for name in sums.sums))
        metrics: dict[str, float] = {}
        for objective in objectives:
            metrics |= objective.metrics(totals, num_tokens) | {
                f"{objective.role}/grad_norm": objective.engine.last_gradient_norm,
                f"{objective.role}/learning_rate": objective.engine.learning_rate,
            }
        return metrics, stepped
