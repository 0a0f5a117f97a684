"""Seconds of SFT steps at long rows: planned, then made on one H200.

`long_rows.py plan PLANNED` writes the planned seconds and GiB of each point, on any machine; `measure MEASURED` makes
the points, one after the other, and adds a JSON line for each as soon as it is known; `table PLANNED MEASURED` prints
both as Markdown. PLANNED is compressed (`.jsonl.bz2`), MEASURED may be. A point is a step of 65,536 tokens, in
micro-batches, of random weights in bf16. Attention has two times: by the flash kernel, of shapes that have not recurred
often, and by cuDNN's.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.learning.quality import read_kept, write_kept
from benchmarks.learning.rows import read_lines
from benchmarks.speed.jobs import NO_HELD_OUT, ROOT, environment, flags, output_words, plain
from benchmarks.speed.planned import planner_of
from pipeline.files import GIB
from pipeline.planning.page import StagePlanner

DEVICE = "1xH200"
SHAPES, LENGTHS = ("qwen3-0.6b", "llama-3-1b", "qwen2.5-1.5b"), (2048, 8192, 16384)
STEP_TOKENS, MICRO_TOKENS = 65_536, 16_384
PASSES_BEFORE_CUDNN = 12  # passes of a shape before cuDNN's kernel, in place of 16: three steps of most points
CUDNN_STEPS = 3  # steps by cuDNN's kernel, of which the first makes its plan
LIMIT_S, POINT_S = 540.0, 60.0  # of all points, and of one from its go to its last step
# Imports what a stage imports, and begins it when it is told to: the next point's imports take no time of their own.
WAITING = f"""
import sys
import pipeline.engine.engine, pipeline.checkpoints.model_folder, step1_sft.training
from pipeline.kernels import attention_choice
from step1_sft.main import main
attention_choice.PASSES_BEFORE_CUDNN = {PASSES_BEFORE_CUDNN}
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of one shape, length and micro-batch, with or without recomputation."""

    shape: str
    length: int
    recomputes: bool
    micro_tokens: int = MICRO_TOKENS

    @property
    def name(self) -> str:
        rows, micro = STEP_TOKENS // self.length, self.micro_tokens // self.length
        how = ", recomputed" if self.recomputes else ""
        return f"{self.shape}, {rows} rows of {self.length:,}, {micro} at once{how}"

    @property
    def passes(self) -> int:
        """Passes of a step."""
        return STEP_TOKENS // self.micro_tokens

    @property
    def steps(self) -> int:
        return PASSES_BEFORE_CUDNN // self.passes + CUDNN_STEPS

    @property
    def words(self) -> str:
        return (
            f"--model_name_or_path {self.shape} --max_seq_len {self.length} --dtype bf16 --zero_stage 0 "
            f"--per_device_train_batch_size {self.micro_tokens // self.length} "
            f"--gradient_accumulation_steps {self.passes} --train_on_prompt true "
            f"--gradient_checkpointing {str(self.recomputes).lower()}"
        )


# The first one is the run by which the times were found too short: no evidence, the other 18 are.
FOUND = Point("qwen3-0.6b", 8192, recomputes=False, micro_tokens=32_768)
POINTS = (
    FOUND,
    *(Point(shape, length, recomputes) for length in LENGTHS for recomputes in (False, True)
      for shape in SHAPES),
)  # fmt: skip


def plan(file: Path) -> None:
    """Write planned seconds of a step and GiB of tensors of each point."""
    planned = {}
    for point in POINTS:
        planner, resolved = planner_of("sft", point.words, DEVICE, StagePlanner)
        memory = planner.memory(resolved)
        seconds = sum(planner.seconds(resolved, memory).values())
        gib = memory.phases["train"].total / GIB
        planned[point.name] = {"seconds": round(seconds, 3), "gib": round(gib, 2)}
    write_kept(file, ({"point": name, **figures} for name, figures in planned.items()))


def make_inputs(folder: Path) -> None:
    """Write the models, and rows that are longer than the longest of a point."""
    from benchmarks.speed.random_models import make_model
    from demo.make import make_data, make_tokenizer

    make_data(folder, seed=0)
    tokenizer = make_tokenizer(folder)
    for shape in SHAPES:
        if not (folder / shape / "tokenizer.json").exists():
            make_model(folder / shape, shape, tokenizer, scores=False)
    for length in LENGTHS:
        words = "the grey otter by the mill sang and the quiet heron looked at it. " * (length // 14 + 1)
        with (folder / f"rows-{length}.jsonl").open("w", encoding="utf-8") as out:
            for number in range((FOUND.steps + 2) * STEP_TOKENS // length):
                out.write(json.dumps({"prompt": f"Number {number}.", "response": words}) + "\n")


def stage_words(point: Point, inputs: Path, output: Path) -> list[str]:
    """Return the words of the stage's command."""
    words: list[object] = list(point.words.replace(point.shape, str(inputs / point.shape), 1).split())
    shared: dict[str, object] = {
        "data_path": inputs / f"rows-{point.length}.jsonl",
        "data_output_path": inputs / "cache",
    }
    shared |= {"max_steps": point.steps + 1}
    return list(map(str, [*words, *flags(shared), *NO_HELD_OUT, *output_words(output), "--report", "false"]))


def started(point: Point, inputs: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Start the process of a point, which imports and waits; return it and its output folder."""
    output = inputs / "runs" / plain(point.name)
    output.mkdir(parents=True, exist_ok=True)
    log = (output / "log.txt").open("w", encoding="utf-8")
    command = [sys.executable, "-c", WAITING, *stage_words(point, inputs, output)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
    )
    return process, output


def seconds_of(point: Point, process: "subprocess.Popen[str]", output: Path) -> dict[str, Any]:
    """Let a process begin, and end it behind its last step; return what its steps took, or its error."""
    began, metrics = time.monotonic(), output / "run" / "metrics.jsonl"
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    lines: list[dict[str, Any]] = []
    while len(lines) < point.steps and process.poll() is None and time.monotonic() - began < POINT_S:
        time.sleep(0.1)
        if metrics.is_file():
            whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
            lines = [line for line in map(json.loads, whole) if "step_s" in line]
    process.kill()
    process.wait()
    took = round(time.monotonic() - began, 1)
    if len(lines) < point.steps:
        end = (output / "log.txt").read_text(encoding="utf-8", errors="replace")[-800:]
        return {"error": f"{len(lines)} steps", "log": end, "took": took}
    steps = [round(line["step_s"], 4) for line in lines[: point.steps]]
    return {
        "seconds": median(steps[1 - CUDNN_STEPS :]),
        "flash_seconds": median(steps[1:-CUDNN_STEPS]),  # the first step warms up
        "steps": steps,
        "gib": max(line.get("gpu_memory_gib", 0.0) for line in lines),
        "reserved_gib": max(line.get("gpu_reserved_gib", 0.0) for line in lines),
        "micro_batch": lines[-1]["micro_batch_size"],
        "took": took,
    }


def measure(file: Path) -> None:
    """Make the points, as many as the time allows, and add a line of each to the file; then those of attention."""
    began, inputs = time.monotonic(), file.parent / "long-rows-inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    waiting = started(POINTS[0], inputs)
    subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.long_rows", "inputs", str(inputs)], env=environment(), check=True
    )
    subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.long_rows", "attention", str(file)], env=environment(), check=True
    )
    for number, point in enumerate(POINTS):
        if time.monotonic() - began > LIMIT_S:
            add_line(file, {"point": point.name, "error": "no time was left"})
            continue
        process, output = waiting
        if following := POINTS[number + 1 : number + 2]:
            waiting = started(following[0], inputs)
        add_line(file, {"point": point.name, **seconds_of(point, process, output)})
    waiting[0].kill()


def measure_attention(file: Path) -> None:
    """Add the TFLOP/s of both kernels of attention for the heads of each shape and each length, without a model."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for shape, heads, width in (("qwen3-0.6b", 16, 128), ("llama-3-1b", 32, 64), ("qwen2.5-1.5b", 12, 128)):
        for length in LENGTHS:
            rows = MICRO_TOKENS // length
            size = (rows, heads, length, width)
            q, k, v, gradient = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            for one in (q, k, v):
                one.requires_grad_()
            operations = 2 * rows * heads * length**2 * width  # of the two products, half of their pairs
            rates = {}
            for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                times = []
                for _ in range(6):
                    with sdpa_kernel(getattr(SDPBackend, name)):
                        marks[0].record()
                        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                        marks[1].record()
                        out.backward(gradient)
                        marks[2].record()
                    torch.cuda.synchronize()
                    times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
                forward, backward = (sorted(one)[2] for one in zip(*times, strict=True))
                rates[name] = {"forward": operations / forward / 1e9, "backward": 2.5 * operations / backward / 1e9}
            add_line(file, {"attention": f"{shape}, {heads} x {width}, {length:,}", "tflops": rates})


def add_line(file: Path, content: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(content) + "\n")
    print(json.dumps(content), flush=True)


def points_in(file: Path) -> dict[str, dict[str, Any]]:
    """Return the points of a file by name; the file is compressed if its name ends in .bz2."""
    lines = read_kept(file) if file.suffix == ".bz2" else read_lines(file)
    return {line["point"]: line for line in lines if "point" in line}


def table(planned: dict[str, Any], measured: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table in Markdown: planned / measured seconds of a step, and GiB of tensors."""
    yield "| point | planned | measured | difference | by flash | difference | GiB planned | GiB measured |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, expected in planned.items():
        found = measured.get(name, {"error": "not run"})
        if "error" in found:
            yield f"| {name} | {expected['seconds']:.2f} s | {found['error']} | | | | {expected['gib']:.1f} | |"
            continue
        cells = [f"{expected['seconds']:.2f} s"]
        for value in (found["seconds"], found["flash_seconds"]):
            cells += [f"{value:.2f} s", f"{expected['seconds'] / value - 1:+.0%}"]
        cells += [f"{one['gib']:.1f}" for one in (expected, found)]
        yield f"| {name} | {' | '.join(cells)} |"


def main(words: Sequence[str]) -> None:
    """Plan, measure, or print the table; a command with too few words is answered with all three."""
    if len(words) < {"table": 3}.get(" ".join(words[:1]), 2):
        sys.exit(__doc__)
    command, file = words[0], Path(words[1])
    if command == "table":
        print(*table(points_in(file), points_in(Path(words[2]))), sep="\n")
    else:
        {"plan": plan, "measure": measure, "inputs": make_inputs, "attention": measure_attention}[command](file)


if __name__ == "__main__":
    main(sys.argv[1:])
