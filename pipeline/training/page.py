"""Output of a stage for users: the banner at its start, samples, and the summary at its end.

A terminal gets them drawn by rich; logs and pipes get plain lines.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import ASCII, ROUNDED
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipeline.checkpoints.checkpoint_files import held_line
from pipeline.configuration.flag_checks import warmup_note
from pipeline.configuration.flag_table import ZERO_STAGE, flags_of_key, flat_items
from pipeline.configuration.stage import StageConfig
from pipeline.console import terminal_width
from pipeline.data.counts import Counts, outcomes_line
from pipeline.engine.build import compute_dtype
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.errors import dashed, is_coloured, printable
from pipeline.files import PROJECT, read_object
from pipeline.models.partitions import whole_numel
from pipeline.run.evaluations import cost, verdict
from pipeline.run.layout import environment_file
from pipeline.run.run import Run
from pipeline.training.progress import duration

log = logging.getLogger(__name__)

Engines = Mapping[str, TrainingEngine | FrozenEngine]
SHOWN_SAMPLES = 3
MOST_CHARACTERS = 180  # shown of a prompt or an answer; a line of a log has at most 200


def show_banner(run: Run, *, counts: Counts, engines: Engines, total_steps: int) -> None:
    """Print the banner of a stage that starts: version, models, rows, hardware, batch, folders."""
    config: StageConfig = run.resolved.config
    environment = read_object(environment_file(run.folder))
    versions = environment.get("versions", {})
    commit = f" ({environment['commit'][:7]})" if environment.get("commit") else ""
    device = "CPU" if environment.get("device") == "cpu" else environment.get("device")
    libraries = [f"{name} {versions.get(name)}" for name in ("torch", "deepspeed", "transformers")]
    lines = {
        "version": ", ".join([f"{PROJECT} {versions.get(PROJECT)}{commit}", *libraries]),
        "models": ", ".join(models_in_words(run, engines)),
        "rows": outcomes_line(counts.outcomes, config.data.data_split),
        "hardware": f"{run.world.size} x {device}, {zero_in_words(config)}, {compute_dtype(run)}",
        "batch": f"{batch_in_words(run)} rows a step, {total_steps} steps",
        "output": f"{config.run.output_dir}; metrics, logs and checkpoints: {run.folder}",
    }
    show(f"{run.stage.title_of(config)}, stage {run.stage.number}", lines)
    if note := warmup_note(config.optimizer, total_steps):
        log.warning("%s", note)


def show_end(run: Run, seconds: float) -> None:
    """Print the summary of a finished stage: its evaluations, and the paths of checkpoint, models and report.

    Warn if the run ends worse than it began, or if most rows were dropped.
    """
    result, outcomes = verdict(run.folder), Counter(run.rows.get("rows", {}))
    if result.worse:
        rate = run.stage.rate_flag(run.resolved.config)
        log.warning("the run ends worse than it began: %s: %s; lower %s", result.worse, result.figures, dashed(rate))
    if outcomes["dropped"] > outcomes["to train on"] + outcomes["held out"]:
        log.warning("most rows were dropped: %s", outcomes_line(outcomes, run.resolved.config.data.data_split))
    reports = [folder / "report.html" for folder in (run.folder, run.folder.parent.parent)]
    lines = {
        "held-out rows": ": ".join(filter(None, (result.figures, result.words))),
        "cost": cost(run.folder),
        "checkpoint": held_line(run.folder / "checkpoints"),
        "model": ", ".join(map(str, run.resolved.config.outputs)),
        "report": ", ".join(str(report) for report in reports if report.is_file()),
    }
    title = f"{run.stage.title_of(run.resolved.config)}: done in {duration(seconds)}"
    show(title, {label: text for label, text in lines.items() if text}, is_boxed=True)


def models_in_words(run: Run, engines: Engines) -> list[str]:
    """Return `actor output/sft: 1,315,758,080 parameters` for each model. A copy of another model has no path."""
    values, words = run.resolved.values, []
    paths = {prefix: values[run.stage.path_flag(prefix)] for prefix in run.stage.starts(values)}
    for name, engine in engines.items():
        path = paths.get(f"{name}_", paths.get("", ""))
        parameters = sum(num_weights(parameter) for parameter in engine.module.parameters())
        words.append(f"{f'{name} {path}'.strip()}: {parameters:,} parameters")
    return words


def num_weights(parameter: Any) -> int:
    """Return the number of weights of a whole parameter, even if its codes are packed (nf4)."""
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel()) if state is not None else whole_numel(parameter)


def zero_in_words(config: StageConfig) -> str:
    """Return `ZeRO stage 2`; if models have different stages, `ZeRO stage 2 and 3`."""
    values = dict(flat_items(config))
    stages = sorted({str(values[name]) for name in flags_of_key(type(config), ZERO_STAGE)})
    return f"ZeRO stage {' and '.join(stages)}"


def batch_in_words(run: Run) -> str:
    """Return `4 x 8 acc x 2 GPU = 64`: a micro-batch, accumulation, ranks, and the rows of an optimizer step."""
    optimizer, ranks = run.resolved.config.optimizer, run.world.size
    micro, steps = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps
    device = "GPU" if run.world.device.type == "cuda" else "CPU"
    return f"{micro} x {steps} acc x {ranks} {device} = {micro * steps * ranks}"


def show(title: str, lines: Mapping[str, str], *, is_boxed: bool = False) -> None:
    """Log a title with labelled lines; a terminal gets them in colour, in a box if `is_boxed`."""
    width = max(map(len, lines))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for label, text in lines.items():
        grid.add_row(Text(label, style="cyan"), Text(printable(text)))
    plain = "\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in lines.items())])
    box = Panel(grid, title=Text(title, style="bold"), expand=False, box=shape())
    log.info("%s", plain, extra={"drawn": drawn(*([box] if is_boxed else [Text(title, style="bold"), grid]))})


def show_samples(label: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Log one sample of each of the first prompts of an evaluation. rows: lines of samples.jsonl."""
    if not rows:
        return
    table, plain = Table(title=f"step {step}: samples of the evaluation", box=shape(), title_justify="left"), []
    for name in ("prompt", "answer"):
        table.add_column(name, ratio=1, overflow="fold")
    number_names = [name for name in ("score", "KL") if name.lower() in rows[0]]
    for name in number_names:
        table.add_column(name, justify="right", no_wrap=True)
    first = {row["prompt"]: row for row in reversed(rows)}
    for row in list(reversed(first.values()))[:SHOWN_SAMPLES]:
        prompt, answer = shortened(row["prompt"], from_end=True), shortened(row["response"])
        numbers = ["-" if row[name.lower()] is None else f"{row[name.lower()]:.3g}" for name in number_names]
        table.add_row(*(Text(text) for text in (prompt, answer, *numbers)))
        said = "".join(f"  {name} {value}" for name, value in zip(number_names, numbers, strict=True))
        plain += [f"  prompt: {prompt}", f"  answer: {answer}", said]
    log.info("%s", "\n".join([f"[{label}] step {step}: samples", *plain]), extra={"drawn": drawn(table)})


def shortened(text: str, *, from_end: bool = False) -> str:
    """Return a text in one line, truncated at its end, or with `from_end` at its start (for the turns of a chat)."""
    line, room = printable(" ".join(text.split())), MOST_CHARACTERS - 4
    if len(line) <= MOST_CHARACTERS:
        return line
    return f"... {line[-room:]}" if from_end else f"{line[:room]} ..."


def shape() -> Any:
    """Return the box style of tables: ASCII if the output's encoding is not UTF-8."""
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # below a progress bar
    return ROUNDED if (getattr(stream, "encoding", None) or "").lower().startswith("utf") else ASCII


def drawn(*parts: RenderableType) -> str | None:
    """Return renderables as text for a terminal; None if the output has neither a terminal nor colour."""
    if not (sys.stderr.isatty() or is_coloured(sys.stderr)):
        return None
    console = Console(
        stderr=True, width=terminal_width(), highlight=False, force_terminal=True, no_color=not is_coloured(sys.stderr)
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get().rstrip("\n")
