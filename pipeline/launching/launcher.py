"""Child processes that start jobs: launch scripts with their signals and exit codes, and DeepSpeed's autotuning.

The ranks are watched by the script's supervisor (pipeline/launching/supervisor.py).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.configuration.ds_json import flags_from_json, read_user_json
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flat_items
from pipeline.configuration.flags import Resolved, flag_words
from pipeline.configuration.run_flags import TRIED
from pipeline.errors import EXIT_STOPPED, EnvironmentFault, InputError, StoppedRun
from pipeline.files import write_text
from pipeline.processes import Signals, kill_session
from pipeline.run.layout import automatic_file

# Process id of an `rlhf train`, at whose death the supervisor stops.
PARENT = "RLHF_TRAIN_PID"
POLL_S = 0.2
# Flags whose values the JSON of a search holds, also where the command gives others.
TUNED = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def launch_file(name: str) -> Path:
    """Return the path of a launch script, or of a preset (`presets/...`), of the installed project or the checkout."""
    return Path(str(files("launch"))) / name


def run_script(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool]:
    """Run `command` to its end, with SIGINT and SIGTERM of this process forwarded to it as SIGTERM.

    Returns its exit code, and True if this process was asked to stop meanwhile.
    """
    variables = {**environment, PARENT: str(os.getpid())}
    # A session of its own: Ctrl-C in a terminal reaches it once, through this process.
    process = subprocess.Popen(command, start_new_session=True, env=variables)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code < 0:
        return EXIT_STOPPED, True  # the shell died of the signal before it had started anything
    return (code if code >= 0 else 128 - code), bool(received)


def tuned_flags(command: Sequence[str], signals: Signals, run_dir: Path, resolved: Resolved) -> dict[str, Any]:
    """Return the flags that DeepSpeed's autotuning has found: a copy of its JSON in the run folder.

    Its experiments are runs of the stage's script, in a folder that is deleted.

    Raises:
        InputError: no file with an autotuning block, or flags against it. EnvironmentFault: it needs a program, or has
            found nothing.
        StoppedRun: on a signal.
    """
    place = command.index("--module")
    module, words = command[place + 1], list[str]()
    for word in command[place + 2 :]:  # DeepSpeed looks for its file behind a flag without "="
        words += word.split("=", 1) if word.startswith("--deepspeed_config=") else [word]
    # Where DeepSpeed looks for programs: this environment is not always on the path.
    searched = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    missing = [] if shutil.which("pdsh", path=searched) else ["pdsh (Debian, Ubuntu: apt-get install pdsh)"]
    missing += [] if find_spec("tabulate") else ["tabulate (pip install tabulate)"]
    if missing:
        raise EnvironmentFault(f"--autotuning: DeepSpeed's search needs {' and '.join(missing)}; install it")
    file = dict(zip(words, words[1:], strict=False)).get("--deepspeed_config", "")
    results = results_folder(file)
    check_left_to_search(resolved, file)
    found, script, folder = results / "ds_config_optimal.json", find_spec(module), run_dir / "autotuning"
    found.unlink(missing_ok=True)
    tried = flag_words({**TRIED, "run_dir": folder / "run", "output_dir": folder / "model"})
    shown = ("--log_level", "info", "--autotuning", "tune")  # the run after it is ours to watch
    search = [*command[:place], *shown, str(script and script.origin), *words, *tried]
    environment = {**os.environ, "PATH": searched}
    process = subprocess.Popen(search, start_new_session=True, stdin=subprocess.DEVNULL, env=environment)
    try:
        while process.poll() is None and signals.first is None:
            time.sleep(POLL_S)
    finally:
        kill_session(process.pid)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    if signals.first is not None:
        raise StoppedRun("stopped while DeepSpeed searched; the same command starts again")
    if not found.is_file():
        raise EnvironmentFault(f"--autotuning: DeepSpeed has found nothing that runs; see {results}/*/stderr.log")
    kept = automatic_file(run_dir.resolve()).with_suffix(".json")
    write_text(kept, found.read_text(encoding="utf-8"))
    tuned = read_user_json(kept)
    return {"deepspeed_config": str(kept)} | {flag: tuned[key] for flag, key in TUNED.items() if key in tuned}


def check_left_to_search(resolved: Resolved, file: str) -> None:
    """Refuse a flag whose value the experiments of a search on `file` contradict. Raises InputError naming it."""
    # A list stands for values to try: as text it is nobody's value.
    tried = json.loads(
        Path(file).read_text(encoding="utf-8"),
        object_hook=lambda block: {
            key: str(value) if isinstance(value, list) else value for key, value in block.items()
        },
    )
    mapped, values = tried["autotuning"].get("arg_mappings") or {}, dict(flat_items(resolved.config))
    said = {"zero_stage": (ZERO_STAGE, "tried")} | flags_from_json(tried, flag_table(type(resolved.config)))
    for name, (key, value) in said.items():
        if resolved.origins[name] != "default" and key not in mapped and values[name] not in ("auto", value):
            reason = f"leave it out, or write it into {file} as {key}"
            raise InputError(f"--{name} {values[name]} ({resolved.origins[name]}): --autotuning tries others; {reason}")


def results_folder(file: str) -> Path:
    """Return the folder of DeepSpeed's results that its JSON names. Raises InputError where it asks for no search."""
    try:
        tuning = json.loads(Path(file).read_text(encoding="utf-8"))["autotuning"]
        return Path(tuning.get("results_dir", "autotuning_results"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"--deepspeed_config {file}: wanted a JSON with a block autotuning (docs/memory.md)") from None
