"""The metrics of a run as they are made: times, rates and memory are added, and progress lines are printed."""

import logging
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from pipeline.configuration.run_flags import RunConfig
from pipeline.console import WIDTH
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.memory import Peaks, memory_table, model_memory
from pipeline.files import GIB
from pipeline.processes import peak_memory
from pipeline.run.run import Run
from pipeline.training.metrics import Metric, MetricsWriter, metric_of

log = logging.getLogger(__name__)

# Rates and the time left are those of so many last steps, or of all in this time where these are more.
RATE_STEPS, RATE_PERIOD_S = 20, 30.0
# Seconds between two lines of a log that nobody watches; between the limits, a share of the time since the start.
LEAST_PAUSE_S, PAUSE_SHARE, MOST_PAUSE_S = 30.0, 0.05, 300.0


class Recorder:
    """Times and peak memory of the phases; metrics and progress lines are written by rank 0 only."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        *,
        start_step: int,
        total_steps: int,
        metrics: Mapping[str, Metric],
        shown: Sequence[str] = ("loss",),
        models: Mapping[str, TrainingEngine | FrozenEngine] | None = None,
    ) -> None:
        """Take the declared `metrics`, and the engines whose memory the log tells after the first step (`models`).

        Raises:
            KeyError: one of those to be `shown` is not declared.
        """
        for name in shown:
            metric_of(name, metrics)
        self.shown = shown
        self.device = run.world.device
        self._models = dict(models or {})
        self._peaks = Peaks(self.device)
        self._phase = ""
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._writer: MetricsWriter | None = None
        if run.world.is_main:
            self._writer = MetricsWriter(
                run.folder,
                stage=run.stage.section,
                metrics=metrics,
                monitors=config.monitors,
                start_step=start_step,
            )
            every = config.print_steps if run.resolved.is_given("print_steps") else 0
            self._progress = Progress(
                run.stage.section, total_steps=total_steps, start_step=max(start_step, 0), every=every
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics outside a training step: evaluations."""
        if self._writer is not None and values:
            self._writer.write(step, values)
            # A no-break space holds a name and its number together where the line is cut.
            numbers = "  ".join(f"{name}\u00a0{readable(value)}" for name, value in values.items())
            text = textwrap.fill(f"[{self._writer.stage}] step {step}: {numbers}", WIDTH, subsequent_indent="    ")
            log.info("%s", text.replace("\u00a0", " "))

    def begin(self, phase: str) -> None:
        """Begin a phase of the step (memory.PHASES), and end the one before: times and peak memory are told apart."""
        now = self._peaks.begin(phase)
        self._ended[self._phase] = now
        self._begun[phase], self._phase = now, phase
        self._ended.pop(phase, None)

    def seconds(self, phase: str) -> float:
        """Return how long `phase` took when it was last made; until now, where it has not ended."""
        return self._ended.get(phase, time.monotonic()) - self._begun[phase]

    def write_training(
        self, step: int, values: Mapping[str, float], *, seconds: float, num_tokens: int, num_rows: int
    ) -> None:
        """Metrics of one optimizer step, with rates and peak memory added."""
        if self._writer is None:
            return
        rates = {"step_s": seconds, "tokens_per_s": num_tokens / seconds, "samples_per_s": num_rows / seconds}
        peaks = self._peaks.taken()
        host = {"host_memory_gib": peak_memory() / GIB}
        self._writer.write(step, {**values, **rates, **peaks, **host})
        if self._models and self.device.type == "cuda":
            # Once, after a step: before it there are neither gradients nor moments.
            held = {name: model_memory(engine, self.device) for name, engine in self._models.items()}
            log.info("\n".join(memory_table(held, peaks)))
            self._models = {}
        self._progress.update(step, {name: values[name] for name in self.shown if name in values})

    def sync(self) -> None:
        """Before a checkpoint: no line of its past may be lost where it stays."""
        if self._writer is not None:
            self._writer.sync()

    def close(self, exit_code: int) -> None:
        """End the sinks of the metrics, when all is saved; `exit_code` says how the run ended."""
        if self._writer is not None:
            self._writer.close(exit_code)

    def end(self) -> None:
        """Remove the progress bar; metrics may still be written."""
        if self._writer is not None:
            self._progress.end()


class Progress:
    """The progress of a run: logged lines, and on a terminal a bar below them.

    The lines are `every` so many steps apart. Where that is 0, a terminal gets one for each step; a log gets those of
    the first and the last step, and in between some that are LEAST_PAUSE_S to MOST_PAUSE_S apart.
    """

    def __init__(
        self, label: str, *, total_steps: int, start_step: int, every: int, console: Console | None = None
    ) -> None:
        console = console or Terminal(stderr=True)
        self._label, self._total, self._first = label, total_steps, start_step + 1
        self._every = every or int(console.is_terminal)  # 0: by time
        self._now = console.get_time
        self._began = self._logged = self._now()
        self._ended: deque[tuple[float, int]] = deque()  # when the last steps ended
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._bar = rich.progress.Progress(
            *columns,
            console=console,
            auto_refresh=False,  # no thread beside the one that launches the kernels
            transient=True,
            redirect_stdout=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total_steps, completed=start_step, rate="")
        self._bar.start()

    def update(self, step: int, shown: Mapping[str, float]) -> None:
        """Show `step` of the total, the given numbers, the rate of the last steps and the time left."""
        now = self._now()
        is_due = self._is_due(step, now)
        self._ended.append((now, step))
        while len(self._ended) > RATE_STEPS + 1 and self._ended[1][0] <= now - RATE_PERIOD_S:
            self._ended.popleft()
        then, first = self._ended[0]
        speed = (step - first) / (now - then) if now > then else 0.0
        rate = f"{speed:.3g} steps/s  {duration((self._total - step) / speed)} left" if speed else ""
        self._bar.update(self._task, completed=step, rate=rate, refresh=True)
        if is_due:
            self._logged = now
            numbers = [f"{name} {readable(value)}" for name, value in shown.items()]
            log.info("%s", "  ".join([f"[{self._label}] {step}/{self._total}", *numbers, *filter(None, [rate])]))

    def _is_due(self, step: int, now: float) -> bool:
        """Tell whether the step that has just ended gets a line; a time limit is kept where steps are short enough."""
        if self._every:
            return step % self._every == 0 or step == self._total
        waited, last = now - self._logged, self._ended[-1][0] if self._ended else now
        pause = min(max(LEAST_PAUSE_S, PAUSE_SHARE * (now - self._began)), MOST_PAUSE_S)
        is_late = waited >= LEAST_PAUSE_S and waited + (now - last) > MOST_PAUSE_S  # behind the next step
        return step in (self._first, self._total) or waited >= pause or is_late

    def end(self) -> None:
        """Remove the bar."""
        self._bar.stop()


class Terminal(Console):
    """A console that never hides the cursor: a run that is killed could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def readable(value: float) -> str:
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"
