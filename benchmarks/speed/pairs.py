"""Two commits of the project in turn: `python -m benchmarks.speed.pairs OLD NEW --repeats 5 step3 generation`.

OLD and NEW are folders with a checkout each. Each run is a process of its own; a line of JSON says what it measured.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.speed.jobs import Jobs, environment, output_words, ppo_words
from benchmarks.speed.run import make_parser

# case -> actor, and responses of a rollout for each that is generated at once; 0: the whole of step 3.
CASES = {
    "step3": ("actor", 0),
    "generation": ("actor", 1),
    "refilled": ("actor", 8),
    "early": ("actor-early", 8),
}
STEP3 = ("step_s", "generate_s", "score_s", "train_s", "samples_per_s")
GENERATION = ("generate_s", "generate_tokens_per_s", "decode_tokens_per_s", "first_token_s", "seconds")


def measure(jobs: Jobs, tree: Path, case: str) -> dict[str, Any]:
    """Run a case of the project in `tree`, and return what it took, or the end of its errors."""
    actor, fill = CASES[case]
    output = jobs.fresh(f"{case}-{tree.name}")
    words = [*ppo_words(jobs.options, jobs.prompts(), actor=actor), *output_words(output)]
    sizes = ["--batches", jobs.options.batch, "--repeats", 2 if fill > 1 else 4, "--fill", fill, "--"]
    module = ["benchmarks.speed.generation", *sizes] if fill else ["step3_ppo.main"]
    paths = [str(tree), os.environ.get("PYTHONPATH", "")]
    variables = environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", *map(str, [*module, *words])]
    done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    if not fill:
        found = jobs.read(output / "run")
        return {name: found.get(name) for name in STEP3}
    found = json.loads(done.stdout.strip().splitlines()[-1])[str(jobs.options.batch)]
    return {name: found[name] for name in GENERATION}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=lambda folder: Path(folder).resolve())
    parser.add_argument("new", type=lambda folder: Path(folder).resolve())
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", default="output/pairs")
    given = parser.parse_args()
    jobs = Jobs(make_parser().parse_args(["early", "--work", given.work]), [])
    jobs.folder.mkdir(parents=True, exist_ok=True)
    jobs.make_models(early="early" in given.cases)
    for turn in range(given.repeats):
        trees = [("old", given.old), ("new", given.new)]
        for name, tree in trees if turn % 2 == 0 else reversed(trees):
            for case in given.cases:
                print(json.dumps({"turn": turn, "tree": name, "case": case} | measure(jobs, tree, case)), flush=True)


if __name__ == "__main__":
    main()
