"""DeepSpeed's autotuning before a run of stage 1: its search runs the stage's script by DeepSpeed's launcher."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_json import flags_from_json, read_user_json
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flags_of_key, flat_items
from pipeline.configuration.flags import Resolved, flag_words
from pipeline.configuration.names import normalise
from pipeline.configuration.run_flags import TRIED
from pipeline.errors import EnvironmentFault, InputError, StoppedRun, dashed
from pipeline.files import write_text
from pipeline.launching.hosts import chosen_devices
from pipeline.launching.machine import free_port
from pipeline.launching.ranks import POLL_S
from pipeline.launching.request import LaunchRequest
from pipeline.processes import Signals, kill_sessions
from pipeline.run.layout import automatic_file

# Flags whose values the JSON of a search holds, also where the command gives others.
TUNED = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def tuned_flags(
    module: str, request: LaunchRequest, signals: Signals, run_dir: Path, resolved: Resolved
) -> dict[str, Any]:
    """Return the flags that DeepSpeed's autotuning has found: a copy of its JSON in the run folder.

    Its experiments are runs of the stage's script, in a folder that is deleted.

    Raises:
        InputError: no file with an autotuning block, or flags against it. EnvironmentFault: it needs a program, or has
            found nothing.
        StoppedRun: on a signal.
    """
    words = list[str]()
    for word in request.words:  # DeepSpeed looks for its file behind a flag with "_" and without "="
        name, *value = word.split("=", 1)
        words += ["--deepspeed_config", *value] if normalise(name) == "__deepspeed_config" else [word]
    # Where DeepSpeed looks for programs: this environment is not always on the path.
    searched = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    missing = [] if shutil.which("pdsh", path=searched) else ["pdsh (Debian, Ubuntu: apt-get install pdsh)"]
    missing += [] if find_spec("tabulate") else ["tabulate (pip install tabulate)"]
    if missing:
        raise EnvironmentFault(f"--autotuning: DeepSpeed's search needs {' and '.join(missing)}; install it")
    file = dict(zip(words, words[1:], strict=False)).get("--deepspeed_config", "")
    results = results_folder(file)
    check_left_to_search(resolved, file)
    best, script, folder = results / "ds_config_optimal.json", find_spec(module), run_dir / "autotuning"
    best.unlink(missing_ok=True)
    tried = flag_words({**TRIED, "run_dir": folder / "run", "output_dir": folder / "model"})
    search = [*launcher_command(request), str(script and script.origin), *words, *tried]
    environment = {**os.environ, "PATH": searched}
    process = subprocess.Popen(search, start_new_session=True, stdin=subprocess.DEVNULL, env=environment)
    try:
        while process.poll() is None and signals.first is None:
            time.sleep(POLL_S)
    finally:
        kill_sessions([process.pid])
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    if signals.first is not None:
        raise StoppedRun("stopped while DeepSpeed searched; the same command starts again")
    if not best.is_file():
        raise EnvironmentFault(f"--autotuning: DeepSpeed has found nothing that runs; see {results}/*/stderr.log")
    copy = automatic_file(run_dir.resolve()).with_suffix(".json")
    write_text(copy, best.read_text(encoding="utf-8"))
    tuned = read_user_json(copy)
    return {"deepspeed_config": str(copy)} | {flag: tuned[key] for flag, key in TUNED.items() if key in tuned}


def launcher_command(request: LaunchRequest) -> list[str]:
    """Return the command of DeepSpeed's search on the devices of a request, up to the script."""
    port, devices = str(request.master_port or free_port()), chosen_devices(request)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--master_port", port]
    are_first = devices == [str(number) for number in range(len(devices))]
    chosen = ["--num_gpus", str(len(devices))] if are_first else ["--include", f"localhost:{','.join(devices)}"]
    return [*command, *chosen, "--no_local_rank", "--autotuning", "tune"]


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
    stages = dict.fromkeys(flags_of_key(type(resolved.config), ZERO_STAGE), (ZERO_STAGE, "tried"))
    said = stages | flags_from_json(tried, flag_table(type(resolved.config)))
    for name, (key, value) in said.items():
        if resolved.origins[name] != "default" and key not in mapped and values[name] not in ("auto", value):
            reason = f"leave it out, or write it into {file} as {key}"
            raise InputError(
                f"{dashed(name)} {values[name]} ({resolved.origins[name]}): --autotuning tries others; {reason}"
            )


def results_folder(file: str) -> Path:
    """Return the folder of DeepSpeed's results that its JSON names. Raises InputError where it asks for no search."""
    try:
        tuning = json.loads(Path(file).read_text(encoding="utf-8"))["autotuning"]
        return Path(tuning.get("results_dir", "autotuning_results"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"--deepspeed-config {file}: expected a JSON with a block autotuning") from None
