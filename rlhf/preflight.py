"""Run preflight and plans of all stages in a separate process: `rlhf train` itself imports torch for a JSON only."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pipeline.configuration.stage import Stage
from pipeline.console import outlive_console
from pipeline.errors import EXIT_DONE, RunError, print_error, show
from pipeline.launching.hosts import chosen_hosts
from pipeline.launching.machine import check_device_count, check_port
from pipeline.preparation.dry_run import look_and_plan
from pipeline.preparation.preflight import look_before_start
from pipeline.preparation.stage_entry import read_flags
from pipeline.processes import python_environment
from pipeline.run.entry import leave
from rlhf.stages import SECTIONS, stage_of
from rlhf.train_config import TrainConfig
from rlhf.train_plan import request_of


def check_machine(config: TrainConfig) -> None:
    """Raise EnvironmentFault or InputError if the machine or the host file does not fit the flags."""
    if config.deployment_type == "multi_node":
        chosen_hosts(request_of(config))
        return
    if config.num_gpus:
        check_device_count(config.num_gpus)
    if config.master_port:
        check_port(config.master_port)


def start_preflight(
    stages: Mapping[Stage, list[str]],
    python: str,
    *,
    dry_run: bool,
    slots: Sequence[int] | None,
    base_of_output: Mapping[str, str],
) -> int:
    """Run `look_before_start` in a new process, which prints notes and errors; return its exit code.

    In a dry run it prints the plans of the stages too.

    Args:
        stages: stage -> its flags as command-line words, in the order of the stages.
        python: path of the interpreter.
        slots: ranks of each machine of the run, for its plan; None: unknown.
        base_of_output: folder of a stage that is not among `stages` -> the model that stage starts from.
    """
    argvs = {stage.section: flags for stage, flags in stages.items()}
    task = json.dumps({"stages": argvs, "dry_run": dry_run, "slots": slots, "base_of_output": base_of_output})
    command = [python, "-m", "rlhf.preflight", task]
    # A new session: Ctrl-C in a terminal reaches only this process, and `run` then kills the other.
    return subprocess.run(command, env=python_environment(), check=False, start_new_session=True).returncode


def main(task: str) -> int:
    """Run the process that `start_preflight` starts; return its exit code."""
    outlive_console()
    content = json.loads(task)
    argvs, bases = content["stages"], content["base_of_output"]
    stages = {stage_of(name): read_flags(stage_of(name), flags, sections=SECTIONS) for name, flags in argvs.items()}
    try:
        if content["dry_run"]:
            look_and_plan(stages, slots=content["slots"], base_of_output=bases, named_by_section=True)
        else:
            configs = {stage: resolved.config for stage, resolved in stages.items()}
            for line in look_before_start(configs, dry_run=False, named_by_section=True, base_of_output=bases):
                show(f"note: {line}")
    except RunError as error:
        sys.stdout.flush()
        return print_error(error)
    return EXIT_DONE


if __name__ == "__main__":
    leave(main(sys.argv[1]))  # without torch's teardown
