"""Recipes against length: PPO whose reward has no length in it, each recipe's answers judged by two gold models.

Length is taken out of a reward in two ways: by pairs in which the longer answer is chosen as often as the shorter one,
and by the function `length` of the box, whose slope is the score's own on answers of SFT to one prompt.
"""

import gzip
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from learning.jobs import Jobs, Work, flags
from learning.policies import AS_IT_IS, PPO, file_name
from learning.rows import read_lines

MAX_ANSWER = 256  # tokens: most answers of SFT end before
GOLDS = ("gold", "gold-2")  # the first chooses a recipe, the second one has another seed
KL_COEF = 0.05
NUM_SAMPLES = {"sft": 16, "run": 4}  # answers to each held-out prompt
KEPT_COLUMNS = ("prompt", "tokens", "finished")  # of an answer, besides its scores


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to train. proxies: reward models of equal weight. length_out: how often their slope is taken off."""

    proxies: tuple[str, ...]
    length_out: float = 0.0


def recipes(depths: list[int]) -> dict[str, Recipe]:
    """Return the recipes by name; of the proxies those of the least and of the middle depth are used."""
    shallow, middle = min(depths), sorted(depths)[len(depths) // 2]
    proxy, balanced = f"proxy-{middle}", f"balanced-{middle}"
    return {
        AS_IT_IS: Recipe((proxy,)),
        "length out": Recipe((proxy,), 1.0),
        "length out 1.5 times": Recipe((proxy,), 1.5),
        "balanced pairs": Recipe((balanced,)),
        "balanced pairs, half of the length out": Recipe((balanced,), 0.5),
        "balanced pairs, length out": Recipe((balanced,), 1.0),
        "two proxies, length out": Recipe((proxy, f"proxy-{shallow}"), 1.0),
    }


def judges(depths: list[int]) -> list[str]:
    """Return the names of all reward models that score the answers."""
    return [*GOLDS, *sorted({name for recipe in recipes(depths).values() for name in recipe.proxies})]


def slope_of(lines: list[dict[str, Any]], names: tuple[str, ...]) -> float:
    """Return how the mean of some scores grows with a token: least squares on the answers to one prompt."""
    groups = defaultdict[int, list[tuple[float, float]]](list)
    for line in lines:
        groups[line["prompt"]].append((line["tokens"], sum(line[name] for name in names) / len(names)))
    above = below = 0.0
    for points in groups.values():
        tokens, score = (sum(column) / len(points) for column in zip(*points, strict=True))
        above += sum((x - tokens) * (y - score) for x, y in points)
        below += sum((x - tokens) ** 2 for x, _ in points)
    return above / below if below else 0.0


def sampled(jobs: Jobs, policy: Path, output: Path, depths: list[int], num_samples: int, gpu: int | None) -> None:
    """Sample a policy's answers to the held-out prompts, with the scores of all reward models."""
    given = {"policy": policy, "prompts": jobs.folder / "data" / "prompts_held_out.jsonl", "output": output}
    given |= {"num_samples": num_samples, "max_answer": MAX_ANSWER}
    words = [*flags(given), "--judges", *(f"{name}={jobs.folder / 'models' / name}" for name in judges(depths))]
    jobs.run(f"quality-{output.stem}", "learning.judge", words, gpu=gpu)


def baseline(jobs: Jobs, depths: list[int]) -> Iterator[Work]:
    """Yield the sampling of SFT's answers, where it has not been."""
    output = jobs.folder / "quality" / "sft.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    if not output.exists():
        yield partial(sampled, jobs, jobs.folder / "models" / "sft", output, depths, NUM_SAMPLES["sft"])


def works(
    jobs: Jobs, depths: list[int], *, seeds: int, steps: int, only: list[str], more: dict[str, Any]
) -> Iterator[Work]:
    """Yield PPO and the judges for each recipe and seed that has not been. only: of these recipes, where any is
    named."""
    for name, recipe in recipes(depths).items():
        for seed in range(1, seeds + 1):
            output = jobs.folder / "quality" / f"{file_name(name)}-seed{seed}.jsonl"
            if (not only or name in only) and not output.exists():
                yield partial(one, jobs, depths, recipe, name, seed, steps, output, more)


def one(
    jobs: Jobs,
    depths: list[int],
    recipe: Recipe,
    name: str,
    seed: int,
    steps: int,
    output: Path,
    more: dict[str, Any],
    gpu: int | None,
) -> None:
    """Train a policy by a recipe and have its answers judged. Raises BenchError."""
    models, data = jobs.folder / "models", jobs.folder / "data"
    run_dir = jobs.folder / "runs" / output.stem
    saved, config = run_dir.with_name(f"{run_dir.name}-models"), run_dir.with_name(f"{run_dir.name}.yaml")
    run_dir.mkdir(parents=True, exist_ok=True)
    first, *others = recipe.proxies
    slope = recipe.length_out * slope_of(read_lines(output.with_name("sft.jsonl")), recipe.proxies)
    settings: dict[str, Any] = {"reward_weight": 1 / len(recipe.proxies)}
    if others:
        settings["more_reward_models"] = [f"{models / proxy}:{1 / len(recipe.proxies)}" for proxy in others]
    if slope:  # the function falls by 1 / margin a token, from 1
        length = {"name": "length", "weight": slope * MAX_ANSWER, "args": {"high": 1, "margin": MAX_ANSWER}}
        settings["reward_function"] = [length]
    config.write_text(json.dumps({"ppo": settings}), encoding="utf-8")
    given = PPO | {
        "actor_model": models / "sft", "critic_model": models / first, "reward_model": models / first,
        "data_path": data / "prompts.jsonl", "eval_data_path": data / "prompts_test.jsonl", "eval_iters": 1,
        "max_answer_seq_len": MAX_ANSWER, "kl_coef": KL_COEF, "missing_eos_penalty": 1.0, "max_steps": steps,
        "data_output_path": jobs.folder / "cache", "seed": seed, "output_dir": saved, "run_dir": run_dir,
        "config": config,
    }  # fmt: skip
    jobs.run(f"quality-{output.stem}-train", "step3_ppo.main", ["--overwrite", *flags(given | more)], gpu=gpu)
    sampled(jobs, saved / "actor", output, depths, NUM_SAMPLES["run"], gpu)
    shutil.rmtree(saved)


def keep(folder: Path, depths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each judged policy: its recipe, seed and KL, and an answer's numbers without its text."""
    names = {file_name(name): name for name in recipes(depths)} | {"sft": "sft"}
    for file in sorted((folder / "quality").glob("*.jsonl")):
        stem, _, seed = file.stem.partition("-seed")
        columns = [*KEPT_COLUMNS, *judges(depths)]
        rows = [[_number(line[column]) for column in columns] for line in read_lines(file)]
        yield {
            "recipe": names[stem],
            "seed": int(seed or 0),
            "columns": columns,
            "rows": rows,
            **_reached(folder, file),
        }


def write_kept(file: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Write one policy a line, compressed; the same lines are the same bytes."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def _number(value: float) -> float:
    return round(float(value), 3) if isinstance(value, float) else int(value)


def _reached(folder: Path, file: Path) -> dict[str, Any]:
    """Return the KL of a run's last evaluation in nats a response, and the weight of its length."""
    run_dir = folder / "runs" / file.stem
    settings = run_dir.with_name(f"{run_dir.name}.yaml")
    if not settings.exists():  # SFT's
        return {}
    config = json.loads(settings.read_text(encoding="utf-8"))["ppo"]
    metrics = read_lines(run_dir / "metrics.jsonl")
    kl = next(line["eval_objective/kl"] for line in reversed(metrics) if "eval_objective/kl" in line)
    return {"reward_function": config.get("reward_function", []), "steps": metrics[-1]["step"], "kl": kl}
