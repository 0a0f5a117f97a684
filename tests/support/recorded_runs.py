"""Folders of runs as stages leave them, written in milliseconds: metrics, samples, logs and outcomes of small runs."""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.configuration.flags import parse
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT
from pipeline.run.outcome import write_outcome
from pipeline.training.meaning import write_meaning
from pipeline.training.metrics import Metric, MetricsWriter
from rlhf.stages import STAGES
from step1_sft import metrics as sft_metrics
from step2_reward import metrics as reward_metrics
from step3_ppo import metrics as ppo_metrics

METRICS: dict[str, Mapping[str, Metric]] = {
    "sft": sft_metrics.METRICS, "reward": reward_metrics.METRICS, "ppo": ppo_metrics.METRICS,
}  # fmt: skip
STARTS = {"sft": ("base",), "reward": ("base",), "ppo": ("sft", "reward")}
HOSTILE = "[red]x[/red] <script>alert(1)</script> \x1b[31m ``` | \u202e end"
ROWS = {
    "title": "ppo", "rows": {"to train on": 64, "held out": 8, "dropped": 3}, "lines": ["ppo rows: 64 to train on"],
    "tokens": {"median": 12, "p95": 30, "longest": 40, "limit": 48},
    "samples": [{"title": "row 1", "tokens": 5, "parts": [{"name": "prompt", "spans": [
        {"text": HOSTILE, "is_trained": False}, {"text": "learned", "is_trained": True}]}]}],
}  # fmt: skip


def words_of(stage: str, output: Path) -> list[str]:
    """The flags of a stage of a road that writes to a folder."""
    prefixes = {"sft": [""], "reward": [""], "ppo": ["actor_", "critic_"]}[stage]
    own = {"output_dir": output if stage == "ppo" else output / stage, "data_path": "train.jsonl"}
    own |= {f"{prefix}model_name_or_path": output / name for prefix, name in zip(prefixes, STARTS[stage], strict=True)}
    return [word for name, value in own.items() for word in (f"--{name}", str(value))]


def values_at(stage: str, step: int) -> dict[str, float]:
    """Metrics of an optimizer step: a loss that falls, a share that is 0 throughout, and a part for each phase."""
    speed = {"step_s": 0.5, "tokens_per_s": 1000.0 + step, "host_memory_gib": 1.25 + step / 100}
    if stage != "ppo":
        return {"loss": 2.0 / step, "grad_norm": 1.0, "learning_rate": 1e-5, **speed}
    phases = {"time/generate_s": 0.2, "time/score_s": 0.1, "time/train_s": 0.15}
    shares = {"completions/truncated_fraction": 0.0, "policy/clipfrac": 0.0, "completions/mean_length": 11.0 + step}
    return {"objective/scores": step / 3, "objective/kl": step / 7, **shares, **phases, **speed}


OF_ROWS = {"sft": "eval_loss", "reward": "eval_accuracy", "ppo": "eval_objective/scores"}


def evaluation_at(stage: str, step: int) -> dict[str, float]:
    """Metrics of an evaluation, better with each step."""
    if stage == "sft":
        return {"eval_loss": 2.5 - step / 10, "eval_perplexity": 12.3456789 - step / 3, "eval_rows": 600}
    if stage == "reward":
        return {"eval_loss": 0.7, "eval_accuracy": 0.5 + step / 31, "eval_margin": step / 9, "eval_rows": 600}
    found = {"scores": step / 3.1 - 0.123456789, "kl": step / 7.7, "entropy": 1.5}
    length = {"eval_completions/mean_length": 20.0 + step, "eval_completions/truncated_fraction": 0.0}
    return {**{f"eval_objective/{name}": value for name, value in found.items()}, **length, "eval_rows": 600}


def samples_at(step: int, texts: Iterable[str] = ("kind", "calm", "brave")) -> str:
    """Lines of samples.jsonl of an evaluation."""
    rows = [
        {"step": step, "prompt": f"\n\nHuman: prompt {number}\n\nAssistant:", "response": f" It was {text} at {step}.",
         "score": number + step / 2, "kl": step / 10, "tokens": 5 + number, "finished": bool(number)}
        for number, text in enumerate(texts)
    ]  # fmt: skip
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def record(
    output: Path, stage: str, *, steps: int = 6, interval: int = 3, code: int | None = 0, total: int | None = None,
    texts: Iterable[str] = ("kind", "calm", "brave"), **flags: object,
) -> Path:  # fmt: skip
    """Write the run of a stage below an output folder; return its folder.

    Args:
        code: how it ended; None: it is running in this process.
    """
    kind = next(one for one in STAGES if one.section == stage)
    resolved = parse(kind.config, words_of(stage, output), section=stage, prog="test")
    folder = kind.run_folder(resolved.config.run)
    folder.mkdir(parents=True)
    run: Any = SimpleNamespace(stage=kind, resolved=resolved, folder=folder, world=SimpleNamespace(size=1))
    write_meaning(run, METRICS[stage], start_step=-1, total_steps=total or steps)
    content = {"value": None, **DEFAULT.entry}
    given = {name: {"value": value, **COMMAND_LINE.entry} for name, value in flags.items()}
    (folder / "config.json").write_text(json.dumps({"seed": content} | given))
    command = [f"{kind.package}/main.py", "--seed", "1 2"]
    (folder / "env.json").write_text(json.dumps({"stage": stage, "device": "cpu", "num_ranks": 1, "command": command}))
    day = time.strftime("%Y-%m-%d %H:%M:%S")
    (folder / "log.txt").write_text(
        f"{day},123 INFO pipeline.x begin\n{day},456 WARNING pipeline.y health: KL is high\n"
    )
    writer = MetricsWriter(folder, stage=stage, metrics=METRICS[stage], monitors=[], start_step=-1)
    for step in range(steps + 1):
        if step:
            writer.write(step, values_at(stage, step))
        if step % interval == 0:
            if stage == "ppo":
                with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                    file.write(samples_at(step, texts))
            values, name = evaluation_at(stage, step), OF_ROWS[stage]
            writer.write_rows(step, {name: [values[name] + n / 10 for n in range(-5, 6)]}, "data")
            writer.write(step, values)
    if code == 0:
        (folder / "done.json").write_text(json.dumps({"stage": stage, "steps": steps}))
    write_outcome(folder, 0, code, "done" if code == 0 else "running" if code is None else "the cause")
    return folder


def record_road(output: Path, **more: Any) -> Path:
    """Write the runs of three stages below an output folder; return it."""
    for stage in METRICS:
        record(output, stage, **more)
    return output


def die(folder: Path) -> None:
    """Make a run one whose rank was killed: its process is gone."""
    outcome = {
        "rank": 0, "code": None, "message": "running", "secondary": False, "pid": 2**22 + 1, "halved": {},
        "host": socket.gethostname(), "supervisor": "", "time": time.time(),
    }  # fmt: skip
    (folder / "outcome" / "rank-0.json").write_text(json.dumps(outcome))


def make_model(folder: Path) -> None:
    """Make a folder that looks like a model's."""
    os.makedirs(folder, exist_ok=True)
    (folder / "config.json").write_text("{}")
