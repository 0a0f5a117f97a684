"""Plan each preset on stated GPUs: `make plans` writes benchmarks/reports/presets.md."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.configuration.flags import parse
from pipeline.configuration.stage import Stage
from pipeline.files import GIB
from pipeline.launching.target import Target, parse_target
from pipeline.planning.page import fits, seconds_text
from pipeline.preparation.plans import choose, stage_planner
from rlhf.train_plan import make_plan
from step1_sft.stage import STAGE as SFT
from website.pages import PRESETS

ROOT = Path(__file__).resolve().parent.parent

# --actor-model: GPUs; of DeepSpeed-Chat's recipes those of its scripts and published times, where there are any.
HARDWARE = {
    "125m": "1xA6000", "350m": "1xA6000", "1.3b": "8xA100-40GB", "1.3b-lora": "1xA6000", "2.7b": "8xA100-40GB",
    "6.7b": "8xA100-80GB", "6.7b-lora": "1xA6000", "13b": "8xA100-40GB", "30b": "8xA100-80GB", "66b": "8x8xA100-80GB",
    "llama-2-7b": "8xA100-80GB", "llama-2-7b-lora": "8xA100-40GB",
    "llama-3.2-1b": "1xH100", "llama-3.2-3b": "4xH100", "llama-3.1-8b": "8xH100",
    "qwen2.5-0.5b": "1xH100", "qwen2.5-1.5b": "1xH100", "qwen2.5-3b": "4xH100", "qwen2.5-7b": "8xH100",
    "qwen3-0.6b": "1xH100", "qwen3-1.7b": "1xH100", "qwen3-4b": "4xH100", "qwen3-8b": "8xH100",
    "smollm2-135m": "1xRTX4090", "smollm2-360m": "1xL40S", "smollm2-1.7b": "1xH100",
    "chinese": "8xA100-40GB", "japanese": "8xA100-40GB", "t5-3b": "1xRTX4090",
}  # fmt: skip
SFT_ALONE = ("chinese", "japanese", "t5-3b")
INTRODUCTION = """# Presets and hardware

**Question:** what does each preset take on stated GPUs?

**Answer:** **planned, not run**: what `rlhf train --actor-model NAME --target GPUS --dry-run` prints, with the preset
of each stage and the default reward model, which is also the critic. A cell holds the expected peak of one GPU in GiB
and the seconds of an optimizer step with rows of full length. *tight*: the high estimate exceeds the memory.

**Repeat:** `make plans`.

- The plan chooses micro-batch, checkpointing, ZeRO stage and prompts sampled at once for these GPUs, as a run does.
- The batch of a step stays the same on other GPUs if their number divides it. Otherwise the log names the batch.
- 125m to 66b, Llama 2, Chinese and Japanese are DeepSpeed-Chat's recipes; 125m, 350m and 2.7b lie between those.
  Its single-GPU scripts are `1.3b-lora` and `6.7b-lora`. Its `7b_mixz` is `llama-2-7b-lora`.
- Chinese, Japanese and T5 are presets of stage 1 alone: `--step 1 --sft.preset launch/presets/NAME.yaml`.
- Times leave out the exchange between GPUs, and offload: none is planned for T5, and those of Llama 2's reward models
  and `llama-2-7b`'s PPO are low.
"""


def stages_of(name: str, *words: str) -> list[tuple[Stage, Any]]:
    """The (stage, settings) of what a name plans: the stages of `train.py --actor-model`, or a preset of SFT."""
    if name in SFT_ALONE:
        preset = str(ROOT / f"launch/presets/{name}.yaml")
        return [(SFT, parse(SFT.config, ["--preset", preset, *words], section="sft"))]
    plan = make_plan(["--actor-model", name, *words], prog="train.py")
    return [(planned.stage, planned.resolved) for planned in plan.chosen]


def planners(name: str, target: Target, *words: str) -> Iterator[tuple[str, Any, Any]]:
    """The (section, planner, settings) of each stage of a name, which may start from the stages before."""
    bases = dict[str, str]()
    for stage, given in stages_of(name, *words):
        planner, resolved = stage_planner(stage, given, target, bases)
        resolved = choose(stage, planner, resolved).of(resolved, target.num_gpus)
        yield stage.section, planner, resolved
        path = planner.needs(resolved).models[0].path
        bases |= {str(folder): path for folder in resolved.config.outputs[:1]}


def row(name: str) -> str:
    """The row of a name in Markdown: of each stage the expected peak, the verdict and the time of a step."""
    target = parse_target(HARDWARE[name])
    # A run on a CPU, as it is without --target, has other settings of communication.
    cells = [f"`{name}`", str(target).partition(",")[0], f"{target.memory / GIB:.1f}"]
    for _, planner, resolved in planners(name, target, "--target", HARDWARE[name]):
        plan, needs = planner.memory(resolved), planner.needs(resolved)
        expected, high = plan.reserved()
        seconds = planner.seconds(resolved, plan)
        step_s = sum(seconds.values()) / needs.steps_each
        verdict = "" if high <= target.memory else ", tight" if fits(plan, target) else ", **does not fit**"
        cells.append(f"{expected / GIB:.1f}{verdict}{f'; {seconds_text(step_s)}' if seconds else ''}")
    return f"| {' | '.join(cells + [''] * (6 - len(cells)))} |"


def page() -> str:
    """The text of benchmarks/reports/presets.md."""
    head = ["| name | GPUs | GiB of each | SFT | reward | PPO |", "|---|---|---|---|---|---|"]
    return "\n".join([INTRODUCTION, *head, *map(row, HARDWARE)]) + "\n"


if __name__ == "__main__":
    PRESETS.write_text(page(), encoding="utf-8")
