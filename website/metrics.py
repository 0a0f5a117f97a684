"""The page of metrics, from the declarations of the stages."""

from collections.abc import Iterable, Mapping

from pipeline.training.metrics import SHARED, SUPERVISED, Metric
from step1_sft.metrics import METRICS as SFT
from step2_reward.metrics import METRICS as REWARD
from step3_dpo.metrics import METRICS as DPO
from step3_ppo.metrics import METRICS as PPO
from step3_ppo.metrics import of_rewards
from website.tables import escaped, row

INTRODUCTION = """# Metrics

`metrics.jsonl` in a run's folder has one line for each optimizer step: `stage`, `step`, `time` and the metrics below.
TensorBoard and the other monitors get the same. [Read the curves](../trouble/curves.md) says what a healthy run looks
like.

- Numbers are of the whole step, over all ranks. A value that is not finite, or that nothing counts into, is null.
- `eval_` before a name is the same metric on held-out rows: before and after training, and every `--eval-interval`
  steps, in lines of their own.
- A metric with a name in the report has a curve there. The others are in `metrics.jsonl` and the monitors alone.
"""
BETTER = {1: "higher", -1: "lower", 0: ""}
PARTS: tuple[tuple[str, str, Mapping[str, Metric], Mapping[str, Metric]], ...] = (
    ("Of every stage", "", SHARED, {}),
    ("Stages 1 and 2, DPO, IPO and KTO", "", SUPERVISED, SHARED),
    ("Stage 1: supervised fine-tuning", "", SFT, SUPERVISED),
    ("Stage 2: the reward model", "", REWARD, SUPERVISED),
    ("Stage 3: PPO and its other methods", "Those of a whole rollout are in the line of its first step.", PPO, SHARED),
    ("Stage 3: DPO, IPO and KTO", "", DPO, SUPERVISED),
    ("Stage 3: each reward", "NAME is a reward function, or a reward model.", of_rewards(["NAME"]), {}),
)


def metric_row(name: str, metric: Metric) -> str:
    """Return the line of a metric."""
    return row(f"`{name}`", metric.title, metric.unit, BETTER[metric.better], escaped(metric.meaning))


def groups_of(metrics: Mapping[str, Metric]) -> Iterable[str]:
    """Return the groups of the metrics, in the order of each group's first metric."""
    return dict.fromkeys(metric.group for metric in metrics.values())


def section(title: str, note: str, metrics: Mapping[str, Metric], listed: Mapping[str, Metric]) -> str:
    """Return the section of a stage: its metrics that no earlier section has `listed`, by group."""
    new = {name: metric for name, metric in metrics.items() if name not in listed}
    lines = [f"## {title}", ""] + ([note, ""] if note else [])
    lines += ["| metric | name in the report | unit | better | meaning |", "|---|---|---|---|---|"]
    for group in groups_of(new):
        lines += [metric_row(name, metric) for name, metric in new.items() if metric.group == group]
    return "\n".join(lines)


def page() -> str:
    """Return the text of reference/metrics.md."""
    return "\n\n".join([INTRODUCTION.rstrip(), *(section(*part) for part in PARTS)]) + "\n"
