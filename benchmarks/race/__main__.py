"""A method with default settings beside TRL as fast as its settings make it (GRPO with vLLM), in one job on one GPU.

    python -m benchmarks.race grpo-1.5b --site FOLDER --json race.jsonl

First a search over TRL's settings, one after the other, by two steps each; then both sides in turn, three times.
`--site` is a folder of packages for TRL's side alone. Each run is a process; a line of JSON is written as soon as it
ends. A search that was cut off continues after the lines that it wrote. Rows of tiny models run on a CPU, where TRL
generates without vLLM.
"""

import argparse
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.learning.rows import read_lines
from benchmarks.race import sides
from benchmarks.speed.jobs import BenchError, environment, flags, last_json, launched, run_logged
from benchmarks.speed.phases import measure

Found = dict[str, Any]

TURNS = 3
SEARCHED = {"steps": 2, "warm_up": 1}


class DevicePeak:
    """Peak MiB of the first GPU in use while a block runs, of all processes, as nvidia-smi has it; 0 without one."""

    def __init__(self) -> None:
        self.mib = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(0.5):
            used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
            self.mib = max([self.mib, *map(int, used[:1])])

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


@dataclass(frozen=True, slots=True)
class Race:
    """A row with its folder of models, data and logs, the packages of TRL's side, and the file of results."""

    row: sides.Row
    folder: Path
    site: str
    file: Path

    def prepare(self) -> None:
        """Make the model of random weights and the rows, of full length, in both sides' forms."""
        from transformers import AutoTokenizer

        from pipeline.data.templates import set_template

        models = self.folder / "models"
        if not (models / "prompts.jsonl").exists():
            words = {"actor": self.row.shape, "critic": self.row.shape, "prompts": 0, "output": models}
            self.run("models", launched("benchmarks.speed.random_models", flags(words), gpus=1))
        tokenizer = AutoTokenizer.from_pretrained(models / "actor")
        set_template(tokenizer, "auto")
        for side, rows in sides.rows_of(self.row, tokenizer).items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.folder / f"{side}.jsonl").write_text(text, encoding="utf-8")

    def run(self, name: str, command: list[str], *, site: str = "") -> str:
        """Run a command to its end; its log is a file. Raises BenchError."""
        return run_logged(f"[race] {name}", command, self.folder / f"{name}.log", environment(site))

    def ours(self, turn: int) -> Found:
        """The command with default settings: what is trained, and nothing about how."""
        output = self.folder / "ours"
        shutil.rmtree(output, ignore_errors=True)
        given = sides.own_flags(self.row) | {
            "deployment-type": "single_gpu", "actor-model": self.folder / "models/actor", "output-dir": output,
            "data-path": self.folder / "ours.jsonl", "data-split": "none",
        }  # fmt: skip
        self.run(f"ours-{turn}", [sys.executable, "train.py", *map(str, flags(given))])
        return measure(next((output / "runs").iterdir()), warm_up=self.row.warm_up)

    def trl(self, name: str, settings: Found) -> Found:
        """TRL's trainer with these settings."""
        row = self.row
        sizes = {key: value for key, value in asdict(row).items() if key not in ("shape", "kind")}
        given = sizes | {"model": self.folder / "models/actor", "data": self.folder / "trl.jsonl"}
        given |= {"output": self.folder / "trl", "settings": json.dumps(settings)}
        module = f"benchmarks.race.trl_{'grpo' if row.kind == 'grpo' else 'supervised'}"
        words = [*flags(given), *([] if row.kind == "grpo" else ["--kind", row.kind])]
        return dict(json.loads(last_json(self.run(name, launched(module, words, gpus=1), site=self.site))))

    def noted(self, side: str, turn: int, settings: Found) -> Found:
        """Run a side once and write what it found, or its error, as a line of JSON."""
        with DevicePeak() as peak:
            try:
                found = self.ours(turn) if side == "ours" else self.trl(f"trl-{side}-{turn}", settings)
            except BenchError as error:
                found = {"error": str(error)[-600:]}
        run = {"row": asdict(self.row), "side": side, "turn": turn, "settings": settings}
        found = run | {"device_gib": peak.mib / 1024} | found
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"[race] {side} {turn} {settings}: {found.get('step_s', 'failed')}", file=sys.stderr, flush=True)
        return found

    def tried(self, turn: int, settings: Found) -> Found:
        """Run a step of the search, or return its line if a search of this row that was cut off has written it."""
        step = {"row": asdict(self.row), "side": "search", "turn": turn, "settings": settings}
        for line in read_lines(self.file) if self.file.is_file() else []:
            if line | step == line and "error" not in line:
                return line
        return self.noted("search", turn, settings)

    def search(self, start: Found) -> Found:
        """Return the fastest settings of TRL's side. Raises BenchError: none of them ran."""
        short = replace(self, row=replace(self.row, **SEARCHED))
        best, seconds = start, short.tried(0, start).get("step_s")
        for turn, settings in enumerate(sides.candidates(self.row.kind, start), 1):
            tried = best | settings
            found = short.tried(turn, tried).get("step_s")
            if found is not None and (seconds is None or found < seconds):
                best, seconds = tried, found
        if seconds is None:
            raise BenchError("no settings of TRL's side ran to their end")
        return best


def main() -> int:
    """Run a race; return 1 if a side never ran to its end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__)
    parser.add_argument("row", choices=sides.ROWS)
    parser.add_argument("--work", default="output/race", help="folder of models, prompts and logs")
    parser.add_argument("--site", default="", help="folder of packages for TRL's side: vLLM, trl")
    parser.add_argument("--json", required=True, help="file to which each run adds a line")
    parser.add_argument("--settings", default="", help="TRL's settings as JSON; empty: search them")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    folder = Path(options.work).resolve() / options.row
    folder.mkdir(parents=True, exist_ok=True)
    race = Race(sides.ROWS[options.row], folder, options.site, Path(options.json).resolve())
    try:
        race.prepare()
        start = sides.START[race.row.kind] | (sides.ON_A_CPU if options.row.startswith("tiny") else {})
        best = start | json.loads(options.settings) if options.settings else race.search(start)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    runs: dict[str, list[float]] = {"ours": [], "trl": []}
    for turn in range(1, options.turns + 1):
        for side, seconds in runs.items():
            seconds += [found["step_s"]] if "step_s" in (found := race.noted(side, turn, best)) else []
    if not all(runs.values()):
        return 1
    ours, theirs = (median(seconds) for seconds in runs.values())
    print(f"{options.row}: ours {ours:.2f} s a step, TRL {theirs:.2f} s with {best}: {theirs / ours:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
