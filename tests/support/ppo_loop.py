"""PPO's loop taken apart for tests: one rollout, its updates, an evaluation; metrics are kept, nothing is written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset
from support.ppo_settings import make_run
from support.ppo_updates import never_stopping
from support.tiny_models import random_rows
from torch import Tensor

from pipeline.data.cache import StageData
from pipeline.data.counts import Counts
from pipeline.run.run import Run
from pipeline.training.halving import Halving
from pipeline.training.metrics import metric_of
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Stopping
from step3_ppo import training
from step3_ppo.build import assemble, build, resume
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Scores
from step3_ppo.metrics import METRICS, of_rewards
from step3_ppo.models.engines import make_models, make_sources
from step3_ppo.rollout import make_schedule
from step3_ppo.state import PPO, State


class KeptMetrics(RunControl):
    """A run's RunControl that is its own Recorder: keeps what that would write. What is due it says itself."""

    def __init__(self, stopping: Stopping, run: Run) -> None:
        self.stopping, self._run, self._config = stopping, run, run.resolved.config.run
        self.halving = Halving(run, [])
        self.recorder = self
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[dict[str, float]] = []
        self.row_values: list[dict[str, Sequence[float]]] = []
        self.rates: list[dict[str, float]] = []

    def begin(self, phase: str) -> None:
        """Phases are not timed."""

    def seconds(self, phase: str) -> float:
        """A time that rates can be divided by."""
        return 1.0

    def write_evaluation(self, step: int, values: Mapping[str, float], rows: Mapping[str, Sequence[float]]) -> None:
        self.evaluations.append(dict(values))
        self.row_values.append(dict(rows))

    def show_samples(self, step: int, rows: Any) -> None:
        """They are not shown."""

    def log(self, state: State, values: Mapping[str, float], **rates: float) -> None:
        for name in values:
            metric_of(name, METRICS | of_rewards([name.partition("/")[2]]))
        self.steps.append((state.step, dict(values)))
        self.rates.append(rates)

    def column(self, name: str) -> list[float]:
        """A metric of the training steps that have it."""
        return [values[name] for _, values in self.steps if name in values]


@dataclass
class PPOLoop:
    """Step 3's loop, driven by a test. scores, judged: of the last rollout."""

    ppo: PPO
    state: State
    control: Any
    scores: Scores = field(init=False)
    judged: Tensor = field(init=False)

    def collect(self) -> Collected:
        """Sample, score and reward a rollout."""
        responses = training.sample(self.ppo, self.state, self.control)
        self.scores = training.score(self.ppo, responses, self.state, self.control)
        judged = training.score_rewards(self.ppo, responses, self.ppo.prompts.train, self.state, self.control)
        self.judged = judged.values
        return training.reward(self.ppo, responses, self.scores, judged, state=self.state, control=self.control)

    def update(self, rollout: Collected) -> None:
        """Take the steps that the rollout has left."""
        while True:
            update = training.step_objectives(self.ppo, rollout, self.state, self.control)
            if update is not None:
                training.log_update(self.ppo, rollout, update, self.state, self.control)
            self.state.update += 1
            if self.state.update == len(rollout.steps):
                training.adapt_kl(self.ppo, rollout, self.state)
                self.state.finish_rollout()
                return

    def iterate(self) -> list[dict[str, float]]:
        """One rollout and its updates; the metrics of its steps."""
        before = len(self.control.steps)
        self.update(self.collect())
        return [values for _, values in self.control.steps[before:]]

    def evaluate(self) -> None:
        training.evaluate(self.ppo, self.state, self.control)

    def restored(self, rollout: Collected) -> Collected:
        """The rollout as a checkpoint would give it back."""
        return Collected.restored(rollout.tensors(), rollout.metrics, self.ppo.run.world.device)


def at_rate(ppo: PPO, rate: float) -> PPO:
    """Return it with this share of the peak learning rates in all steps."""
    return replace(ppo, updater=replace(ppo.updater, rate=lambda step: rate))


def make_loop(run: Run, config: PPOConfig) -> PPOLoop:
    """The loop of a run at a constant rate."""
    ppo, resumed = build(run, config)
    state, _ = resume(ppo, resumed)
    return PPOLoop(at_rate(ppo, 1.0), state, KeptMetrics(Stopping(run), run))


def loop_on_random_prompts(
    world, folder, config: PPOConfig, *, num_prompts: int = 4, num_eval: int = 3, text: Any = None
) -> PPOLoop:
    """The loop on prompts of random tokens, at a constant rate; `text`: a loader of the ptx text.

    Rewards read the column `number`: 10, 11, ... of the prompts to train on, 20, 21, ... of those held out.
    """

    def rows(seed: int, count: int) -> Dataset:
        ids = [row.tolist() for row in random_rows(seed, (5, 2, 8, 1, 3, 4, 6, 7)[:count])]
        turns = json.dumps([{"role": "user", "content": "tea"}])
        return Dataset.from_list(
            [
                {"prompt_ids": row, "prompt_id": n, "messages": turns, "extra": json.dumps({"number": 10 * seed + n})}
                for n, row in enumerate(ids)
            ]
        )

    run = make_run(world, folder, config)
    prompts = StageData(rows(1, num_prompts), rows(2, num_eval), Counts(passed={"random": {"number"}}))
    schedule = replace(make_schedule(config, num_prompts=num_prompts, world_size=1), total_steps=100)
    ppo = assemble(
        run, config, make_models(run, config, make_sources(run, config)),
        prompts=prompts, text=text, schedule=schedule, fingerprint=None,
    )  # fmt: skip
    return PPOLoop(at_rate(ppo, 1.0), State(kl_coef=config.ppo.kl_coef), KeptMetrics(never_stopping(world), run))
