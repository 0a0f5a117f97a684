"""The recipes trained, and each policy's answers to the held-out prompts judged by two gold models."""

import bz2
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning.jobs import Jobs, Work, flags
from benchmarks.learning.policies import PPO, file_name
from benchmarks.learning.recipes import ANSWERS, COMPARING, SAMPLED, Recipe, recipes
from benchmarks.learning.rows import read_lines, write
from pipeline.configuration.flag_table import flag_table
from pipeline.files import write_bytes
from step3_dpo.config import DPOConfig

MAX_ANSWER = 256  # tokens: most answers of SFT end before
GOLDS = ("gold", "gold-2")  # the first chooses a recipe, the second one has another seed
KL_COEF = 0.05
NUM_SAMPLES = {"sft": 16, "run": 4}  # answers to each held-out prompt
KEPT_COLUMNS = ("prompt", "tokens", "finished")  # of an answer, besides its scores
# Of the runs on pairs; a rate that is common for full fine-tuning of a small model. Pairs are about as many as PPO has
# rows, and what is sampled is a quarter of that, read several times.
DPO: dict[str, Any] = {
    "data_split": "none", "enable_tensorboard": "false", "keep_checkpoints": 0, "eval_fraction": 0.0,
    "max_seq_len": PPO["max_prompt_seq_len"] + MAX_ANSWER, "per_device_train_batch_size": 32, "learning_rate": 5e-6,
    "num_warmup_steps": 10,
}  # fmt: skip
SAMPLED_EPOCHS = 3


def judges(folder: Path, depths: list[int], policy: str) -> list[str]:
    """Return the names of the reward models that score a policy's answers: SFT's are scored by the proxies as well.

    Proxies that were not trained (`models --reward_models`) are left out.
    """
    proxies = {name for recipe in recipes(depths).values() for name in recipe.proxies} if policy == "sft" else ()
    return [*GOLDS, *sorted(name for name in proxies if (folder / "models" / name / "config.json").exists())]


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


def reward_slope(models: Path, lines: list[dict[str, Any]], names: tuple[str, ...]) -> float:
    """Return the slope of the reward that stage 3 makes of the mean of some scores, each in its own deviations."""

    def deviation(name: str) -> float:
        config = json.loads((models / name / "config.json").read_text(encoding="utf-8"))
        return float(config["score_std"])

    return sum(slope_of(lines, (name,)) / deviation(name) for name in names) / len(names)


def sampled(jobs: Jobs, policy: Path, output: Path, depths: list[int], num_samples: int, gpu: int | None) -> None:
    """Sample a policy's answers to the held-out prompts, with the scores of its judges, and beside SFT."""
    given = {"policy": policy, "prompts": jobs.folder / "data" / "prompts_held_out.jsonl", "output": output}
    given |= {"num_samples": num_samples, "max_answer": MAX_ANSWER}
    sft = jobs.folder / "models" / "sft"
    given |= {"reference": sft} if policy != sft else {}
    names = judges(jobs.folder, depths, output.stem)
    words = [*flags(given), "--judges", *(f"{name}={jobs.folder / 'models' / name}" for name in names)]
    jobs.run(f"quality-{output.stem}", "benchmarks.learning.judge", words, gpu=gpu)


def baseline(jobs: Jobs, depths: list[int]) -> Iterator[Work]:
    """Yield the sampling of SFT's answers, where it has not been."""
    output = jobs.folder / "quality" / "sft.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    if not output.exists():
        yield partial(sampled, jobs, jobs.folder / "models" / "sft", output, depths, NUM_SAMPLES["sft"])


def works(
    jobs: Jobs, depths: list[int], *, seeds: int, steps: int, only: list[str], more: dict[str, Any]
) -> Iterator[Work]:
    """Yield training and judges for each recipe and seed that has not been; `only` of these recipes, if any."""
    for name, recipe in recipes(depths).items():
        for seed in range(1, seeds + 1):
            output = jobs.folder / "quality" / f"{file_name(name)}-seed{seed}.jsonl"
            if (not only or name in only) and not output.exists():
                yield partial(one, jobs, depths, recipe, seed, steps, output, more)


def one(
    jobs: Jobs,
    depths: list[int],
    recipe: Recipe,
    seed: int,
    steps: int,
    output: Path,
    more: dict[str, Any],
    gpu: int | None,
) -> None:
    """Train a policy by a recipe and have its answers judged. Raises BenchError."""
    run_dir = jobs.folder / "runs" / output.stem
    saved = run_dir.with_name(f"{run_dir.name}-models")
    run_dir.mkdir(parents=True, exist_ok=True)
    steps = round(steps * recipe.steps)
    shared = {"data_output_path": jobs.folder / "cache", "seed": seed, "run_dir": run_dir, "max_steps": steps}
    if recipe.method == "dpo":
        pairs = jobs.folder / "data" / f"{recipe.pairs}.jsonl"
        if recipe.pairs == SAMPLED:
            pairs = sampled_pairs(jobs, recipe, run_dir.with_name(f"{run_dir.name}-pairs.jsonl"), seed, steps, gpu)
        epochs = SAMPLED_EPOCHS if recipe.pairs == SAMPLED else 1
        stage, given = "step3_dpo", DPO | {"model_name_or_path": jobs.folder / "models" / "sft", "data_path": pairs}
        given |= {"num_train_epochs": epochs, "output_dir": saved / "actor"}
        more = {name: value for name, value in more.items() if name in flag_table(DPOConfig)}
    else:
        stage, given = "step3_ppo", of_rewards(jobs, recipe, output) | {"output_dir": saved}
    words = ["--overwrite", *flags(given | shared | recipe.changes | more)]
    module = f"{stage}.main"
    if recipe.sampler_bits:
        module, words = "benchmarks.learning.workers", ["rounded", recipe.sampler_bits, *words]
    jobs.run(f"quality-{output.stem}-train", module, words, gpu=gpu)
    sampled(jobs, saved / "actor", output, depths, NUM_SAMPLES["run"], gpu)
    shutil.rmtree(saved)


def of_rewards(jobs: Jobs, recipe: Recipe, output: Path) -> dict[str, Any]:
    """Return the flags of a recipe that samples; a YAML file beside the run has those of its rewards."""
    models, data, config = jobs.folder / "models", jobs.folder / "data", jobs.folder / "runs" / f"{output.stem}.yaml"
    first, *others = recipe.proxies
    slope = recipe.length_out * reward_slope(models, read_lines(output.with_name("sft.jsonl")), recipe.proxies)
    settings: dict[str, Any] = {"reward_weight": 1 / len(recipe.proxies)}
    if others:
        settings["more_reward_models"] = [f"{models / proxy}:{1 / len(recipe.proxies)}" for proxy in others]
    if slope:  # the function falls by 1 / margin a token, from 1
        length = {"name": "length", "weight": slope * MAX_ANSWER, "args": {"high": 1, "margin": MAX_ANSWER}}
        settings["reward_function"] = [length]
    config.write_text(json.dumps({"ppo": settings}), encoding="utf-8")
    given = PPO | {
        "method": recipe.method, "actor_model": models / "sft", "reward_model": models / first, "config": config,
        "data_path": data / "prompts.jsonl", "eval_data_path": data / "prompts_test.jsonl", "eval_iters": 1,
        "max_answer_seq_len": MAX_ANSWER, "kl_coef": KL_COEF, "missing_eos_penalty": 1.0,
    }  # fmt: skip
    if recipe.method in COMPARING:  # as many responses a step, of fewer prompts
        prompts = PPO["per_device_generation_batch_size"] // ANSWERS
        given = {name: value for name, value in given.items() if not name.startswith("critic_")}
        return given | {"num_samples_per_prompt": ANSWERS, "per_device_generation_batch_size": prompts}
    return given | {"critic_model": models / first}


def sampled_pairs(jobs: Jobs, recipe: Recipe, file: Path, seed: int, steps: int, gpu: int | None) -> Path:
    """Sample as many answers of SFT as PPO samples in so many steps; return the file of best and worst by a proxy."""
    count = max(1, steps * PPO["per_device_generation_batch_size"] // ANSWERS)
    prompts, models = file.with_name(f"{file.stem}-prompts.jsonl"), jobs.folder / "models"
    write(prompts, read_lines(jobs.folder / "data" / "prompts.jsonl")[:count])
    given = {
        "model": models / "sft", "data": prompts, "n": ANSWERS, "reward_model": models / recipe.proxies[0],
        "write_as": "pairs", "max_new_tokens": MAX_ANSWER, "max_prompt_seq_len": PPO["max_prompt_seq_len"],
        "batch_size": PPO["per_device_generation_batch_size"], "seed": seed, "output": file,
    }  # fmt: skip
    jobs.run(f"{file.stem}-sample", "rlhf.rewards.sample", ["--overwrite", *flags(given)], gpu=gpu)
    return file


def keep(folder: Path, depths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each judged policy: its recipe, seed and KL, and an answer's numbers without its text."""
    names = {file_name(name): name for name in recipes(depths)} | {"sft": "sft"}
    for file in sorted((folder / "quality").glob("*.jsonl")):
        stem, _, seed = file.stem.partition("-seed")
        columns = [*KEPT_COLUMNS, *judges(folder, depths, stem)]
        rows = [[_number(line[column]) for column in columns] for line in read_lines(file)]
        yield {
            "recipe": names[stem],
            "seed": int(seed or 0),
            "columns": columns,
            "rows": rows,
            **_reached(folder, file),
        }


def write_kept(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines, compressed and atomically; the same lines are the same bytes."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_bytes(file, bz2.compress(text.encode()))


def read_kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bz2.decompress(file.read_bytes()).splitlines()]


def _number(value: float) -> float:
    return round(float(value), 3) if isinstance(value, float) else int(value)


def _reached(folder: Path, file: Path) -> dict[str, Any]:
    """Return the KL of a policy to SFT in nats a response, on its own answers, and the weight of its length."""
    if file.stem == "sft":
        return {}
    settings, ratios = folder / "runs" / f"{file.stem}.yaml", [line["log_ratio"] for line in read_lines(file)]
    config = json.loads(settings.read_text(encoding="utf-8"))["ppo"] if settings.exists() else {}
    steps = read_lines(folder / "runs" / file.stem / "metrics.jsonl")[-1]["step"]
    kl = round(sum(ratios) / len(ratios), 3)
    return {"reward_function": config.get("reward_function", []), "steps": steps, "kl": kl}
