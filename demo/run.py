"""The demo from end to end: data, base model, the three stages through train.py, and a report against the rule.

`python -m demo.run` works in the current folder, writes below `output/`, and ends with 1 if a claim fails. With
`--method grpo` (rloo, reinforce_pp) there is no reward model: the rule itself is the reward function of stage 3.
With `--method dpo` (ipo, kto) stage 3 learns from the pairs that are else stage 2's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pipeline.errors import InputError, dashed
from pipeline.processes import let_threads_sleep

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("output/demo")


def call(command: list[str]) -> None:
    """Run a command of the project as a user would; if it fails, the demo ends with its exit code."""
    environment = os.environ | {"PYTHON": sys.executable}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def say(text: str) -> None:
    print(f"\n=== {text}", file=sys.stderr, flush=True)


def run(*, seed: int, overwrite: bool, method: str = "ppo") -> dict[str, float]:
    """Run the whole demo with one seed and return the results."""
    started = time.monotonic()
    let_threads_sleep()
    import transformers  # imported here, with torch, so that `--help` is quick

    from demo.make import make_data, make_model
    from demo.report import measure
    from pipeline.dist import find_gpu
    from rlhf.stages import stages_of_method

    transformers.utils.logging.disable_progress_bar()
    find_gpu()
    again = ["--overwrite"] if overwrite else []
    last = stages_of_method(method)[3].section
    sections = ("sft", "reward", "ppo") if method == "ppo" else ("sft", last)
    seeds = [word for stage in sections for word in (dashed(f"{stage}.seed"), str(seed))]
    say(f"data, tokenizer and an untrained model in {FOLDER}")
    make_data(FOLDER, seed=seed)
    make_model(FOLDER, seed=seed)
    say("base model: stage 1 on plain text")
    preset = ROOT / "demo" / "base.yaml"
    base = ["1", "--preset", str(preset), "--seed", str(seed), "--report", "false", *again]  # train.py's has all runs
    call(["bash", str(ROOT / "launch" / "single_gpu.sh"), *base])
    train = [sys.executable, str(ROOT / "train.py"), "--deployment-type", "single_gpu", "--actor-model", "tiny", *seeds]
    if method == "ppo":
        call([*train, "--step", "1", "2", "3", "--reward-model", "tiny", *again])
    else:
        rule = ["--ppo.reward-function", f"{ROOT / 'demo' / 'rule.py'}:kindness"] if last == "ppo" else []
        call([*train, "--step", "1", "3", "--method", method, *rule, *again])
    say("sampling answers to prompts that no step has seen")
    results = measure(Path("output"), seed=seed, method=method)
    results["minutes"] = (time.monotonic() - started) / 60
    (FOLDER / "result.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 1 if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1234, help="seed of data, weights and training [1234]")
    parser.add_argument("--overwrite", action="store_true", help="start over although output/ holds finished runs")
    methods = "ppo, grpo, rloo, reinforce_pp, dpo, ipo or kto"
    parser.add_argument("--method", default="ppo", help=f"how stage 3 learns: {methods} [ppo]")
    options = parser.parse_args(argv)
    try:
        results = run(seed=options.seed, overwrite=options.overwrite, method=options.method)
    except InputError as error:
        parser.error(str(error))
    from demo.report import failed_claims, table, verdict

    print(table(results), verdict(results), sep="\n\n")
    return 1 if failed_claims(results) else 0


if __name__ == "__main__":
    sys.exit(main())
