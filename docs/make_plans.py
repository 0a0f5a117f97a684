"""Write docs/plans.md, the plan of each preset on the GPUs that it is meant for: `python docs/make_plans.py`."""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"  # shapes are those of launch/shapes.yaml

from pipeline.configuration.flags import parse  # noqa: E402
from pipeline.files import GIB  # noqa: E402
from pipeline.launching.dry_run import stage_planner  # noqa: E402
from pipeline.launching.plan import make_plan  # noqa: E402
from pipeline.launching.target import parse_target  # noqa: E402
from pipeline.planning.duration import phase_seconds  # noqa: E402
from pipeline.planning.page import fits, seconds_text  # noqa: E402
from pipeline.run.layout import model_folders  # noqa: E402
from rlhf.train import STAGES  # noqa: E402
from step1_sft.config import SFTConfig  # noqa: E402

# --actor-model: GPUs; of DeepSpeed-Chat's recipes those of its scripts and published times, where there are any.
HARDWARE = {
    "125m": "1xA6000", "350m": "1xA6000", "1.3b": "8xA100-40GB", "1.3b-lora": "1xA6000", "2.7b": "8xA100-40GB",
    "6.7b": "8xA100-80GB", "6.7b-lora": "1xA6000", "13b": "8xA100-40GB", "30b": "8xA100-80GB", "66b": "8x8xA100-80GB",
    "llama-2-7b": "8xA100-80GB", "llama-2-7b-lora": "8xA100-40GB",
    "llama-3.2-1b": "1xH100", "llama-3.2-3b": "4xH100", "llama-3.1-8b": "8xH100",
    "qwen2.5-0.5b": "1xH100", "qwen2.5-1.5b": "1xH100", "qwen2.5-3b": "4xH100", "qwen2.5-7b": "8xH100",
    "qwen3-0.6b": "1xH100", "qwen3-1.7b": "1xH100", "qwen3-4b": "4xH100", "qwen3-8b": "8xH100",
    "smollm2-135m": "1xRTX4090", "smollm2-360m": "1xL40S", "smollm2-1.7b": "1xH100",
    "chinese": "8xA100-40GB", "japanese": "8xA100-40GB",
}  # fmt: skip
SFT_ALONE = ("chinese", "japanese")
INTRODUCTION = """# Plans of the presets

Made by `python docs/make_plans.py` (minutes on a laptop, no network): **planned, not run**. Each row is what
`python train.py --actor-model NAME --target GPUS --dry-run` says of memory and time, with the preset of each stage and
the default reward model, which is stage 3's critic. Cells have the expected GiB of a GPU at its peak and the seconds of
an optimizer step, for rows of full length; what of them was measured says [memory.md](memory.md). *tight*: the high
estimate is above the device's memory. The batch of a step stays the same on other GPUs, by accumulation.

The names from 125m to 66b, Llama 2, Chinese and Japanese are DeepSpeed-Chat's recipes, of which 125m, 350m and 2.7b are
ours after its neighbours. Its single-GPU scripts are `1.3b-lora` and `6.7b-lora`; its `7b_mixz` is `llama-2-7b-lora`,
without quantised weights under ZeRO-3. Chinese and Japanese are presets of stage 1 alone
([how](running.md#models)). `t5-3b` is not planned: encoder-decoder models are not.
"""


def stages_of(name: str) -> list[tuple[str, Any]]:
    """The (section, settings) of what a name plans: the stages of `train.py --actor-model`, or a preset of SFT."""
    if name in SFT_ALONE:
        words = ["--preset", str(ROOT / f"launch/presets/{name}.sft.yaml")]
        return [("sft", parse(SFTConfig, words, section="sft"))]
    plan = make_plan(["--actor-model", name], STAGES, prog="train.py")
    return [(stage.kind.section, stage.resolved) for stage in plan.chosen]


def row(name: str) -> str:
    """The row of a name in Markdown: of each stage the expected peak, the verdict and the time of a step."""
    target, made = parse_target(HARDWARE[name]), dict[str, str]()
    cells = [f"`{name}`", str(target).partition(",")[0], f"{target.memory / GIB:.1f}"]
    for section, given in stages_of(name):
        planner, resolved = stage_planner(given, section, target, made)
        plan, needs = planner.memory(resolved), planner.needs(resolved)
        expected, high = plan.reserved(plan.phases[plan.worst].total)
        seconds = sum(phase_seconds(needs, planner.dtype(resolved), target, slots=plan.slots).values())
        verdict = "" if high <= target.memory else ", tight" if fits(plan, target) else ", **does not fit**"
        cells.append(f"{expected / GIB:.1f}{verdict}; {seconds_text(seconds / needs.steps_each)}")
        made |= {str(folder): needs.models[0].path for folder in model_folders(resolved.config, section)[:1]}
    return f"| {' | '.join(cells + [''] * (6 - len(cells)))} |"


def page() -> str:
    """The text of docs/plans.md."""
    head = ["| name | GPUs | GiB of each | SFT | reward | PPO |", "|---|---|---|---|---|---|"]
    return "\n".join([INTRODUCTION, *head, *map(row, HARDWARE)]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "plans.md").write_text(page(), encoding="utf-8")
