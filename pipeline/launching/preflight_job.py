"""`look_before_start` and the plan as a process of their own: `rlhf train` starts it and imports no torch itself."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pipeline.errors import EXIT_DONE, RunError, print_error
from pipeline.launching.dry_run import look_and_plan
from pipeline.launching.job import STAGES, stage_flags
from pipeline.launching.preflight import look_before_start
from pipeline.processes import python_environment

MODULES = {section: module for module, (_, _, section) in STAGES.items()}


def start_preflight(
    stages: Mapping[str, list[str]],
    python: str,
    *,
    dry_run: bool,
    slots: Sequence[int] | None,
    made: Mapping[str, str],
) -> int:
    """Run `look_before_start` in a process of its own, which prints notes and errors; return its exit code.

    In a dry run it prints the plans of the stages too.

    Args:
        stages: section -> the words of the stage's flags, in the order of the stages.
        python: the interpreter.
        slots: ranks of each machine of the run, for its plan; None: not known.
        made: folder of a stage that is not among `stages` -> the model from which it is taken as made.
    """
    task = json.dumps({"stages": stages, "dry_run": dry_run, "slots": slots, "made": made})
    command = [python, "-m", "pipeline.launching.preflight_job", task]
    # A session of its own: Ctrl-C in a terminal reaches this process alone, and `run` then kills the other.
    return subprocess.run(command, env=python_environment(), check=False, start_new_session=True).returncode


def main(task: str) -> int:
    """Do the work of the process that `start_preflight` starts; return its exit code."""
    content = json.loads(task)
    stages = {section: stage_flags(MODULES[section], words)[0] for section, words in content["stages"].items()}
    try:
        if content["dry_run"]:
            look_and_plan(stages, slots=content["slots"], made=content["made"], named_by_section=True)
        else:
            configs = {section: resolved.config for section, resolved in stages.items()}
            for line in look_before_start(configs, dry_run=False, named_by_section=True, made=content["made"]):
                print(f"note: {line}")
    except RunError as error:
        sys.stdout.flush()
        return print_error(error)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
