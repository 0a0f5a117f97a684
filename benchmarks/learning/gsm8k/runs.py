"""The runs of the report on GSM8K, each trained by one command and then asked the questions that are shown.

    python -m benchmarks.learning gsm8k --data FOLDER
    python -m benchmarks.learning gsm8k_runs --base FOLDER --recipes base sft grpo --seeds 3

A run that has its answers is not made again, and one that was killed goes on from its checkpoint.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.learning.jobs import BenchError, Jobs, Work, flags

MAX_ANSWER = 512
NUM_SAMPLED = 200  # the first questions that are shown get NUM_ANSWERS at temperature 1, all of them one greedy answer
NUM_ANSWERS = 8
STEPS = 200
BOTH: dict[str, Any] = {"deployment_type": "single_gpu", "data_split": "none"}
SFT = BOTH | {"step": 1, "column_map": "response=answer", "sft.num_train_epochs": 4, "sft.max_steps": STEPS}
STEP_3 = BOTH | {
    "step": 3, "ppo.reward_function": "right_number", "ppo.train_batch_size": 256, "ppo.num_samples_per_prompt": 8,
    "ppo.max_prompt_seq_len": 320, "ppo.max_answer_seq_len": MAX_ANSWER, "ppo.actor_learning_rate": 3e-6,
    "lr_scheduler_type": "constant", "num_warmup_steps": 5, "ppo.num_train_epochs": 2, "ppo.max_steps": STEPS,
    "ppo.eval_interval": 40, "ppo.eval_samples_per_prompt": 4,
}  # fmt: skip
CRITIC = {"ppo.kl_coef": 0, "ppo.gae_lambda": 1, "ppo.critic_learning_rate": 1e-5}
RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "grpo": STEP_3 | {"method": "grpo"},
    "sft": SFT,
    "ppo": STEP_3 | {"method": "ppo"} | CRITIC,
    "lora": STEP_3 | {"method": "grpo", "ppo.actor_lora_dim": 32},
    "dpo": BOTH | {"step": 3, "method": "dpo"},
    "rloo": STEP_3 | {"method": "rloo", "ppo.kl_coef": 0},
    "distill": {key: value for key, value in STEP_3.items() if key != "ppo.reward_function"} | {
        "method": "distill", "ppo.num_samples_per_prompt": 1, "ppo.eval_samples_per_prompt": 1,
        "ppo.actor_learning_rate": 1e-5, "ppo.max_steps": 100,
    },
    "imitate": {key: value for key, value in SFT.items() if key != "column_map"},
}  # fmt: skip
TEACHER = "grpo_s1"  # the run whose model `distill` learns from, and whose answers `imitate` learns
ONE_SEED = ("base", "sft", "dpo", "imitate")
SECTIONS = {"sft": "sft", "imitate": "sft", "dpo": "dpo"}
FORMS = {"base_form": "form", "base_bare": "bare"}  # the base answers both forms of the prompt, all others `form`


def works(jobs: Jobs, base: str, names: Sequence[str], seeds: int, more: dict[str, Any]) -> Iterator[Work]:
    """Yield the runs of the recipes of these names, by default all, with seeds 1 to `seeds`; more: flags of training.

    Raises KeyError for an unknown name.
    """
    (jobs.folder / "answers").mkdir(parents=True, exist_ok=True)
    for form in ("form", "bare"):
        shorten(jobs.folder / "data", form)
    for name in names or RECIPES:
        recipe = RECIPES[name] | (more if RECIPES[name] else {})
        for seed in range(1, (1 if name in ONE_SEED else seeds) + 1):
            yield partial(run, jobs, base, name, seed, recipe)


def shorten(data: Path, form: str) -> None:
    """Write the questions that get several answers each."""
    with (data / f"gsm8k_{form}_test.jsonl").open(encoding="utf-8") as file:
        (data / f"gsm8k_{form}_sampled.jsonl").write_text("".join(islice(file, NUM_SAMPLED)), encoding="utf-8")


def run(jobs: Jobs, base: str, name: str, seed: int, recipe: dict[str, Any], gpu: int | None) -> None:
    """Train a recipe with one seed and write its answers."""
    if name == "base":
        for key, form in FORMS.items():
            answer(jobs, key, base, form, gpu)
        return
    key, output, data = f"{name}_s{seed}", jobs.folder / "gsm8k" / f"{name}_s{seed}", jobs.folder / "data"
    section, teacher = SECTIONS.get(name, "ppo"), output.parent / TEACHER / "actor"
    rows, held_out = data / "gsm8k_form_train.jsonl", data / "gsm8k_form_choice.jsonl"
    given = {"actor_model": base, "seed": seed, "data_seed": seed, "output_dir": output, "data_path": rows}
    if name in ("distill", "imitate") and not teacher.exists():
        raise BenchError(f"{key} learns from {teacher}, which is not there: run --recipes grpo to its end before")
    if name == "dpo":
        given["data_path"] = pairs = data / "gsm8k_pairs.jsonl"
        sample(jobs, f"{key}.pairs", {"model": base, "data": rows, "write_as": "pairs", "n": 8, "output": pairs}, gpu)
    elif name == "imitate":
        given["data_path"] = written = data / "gsm8k_teacher.jsonl"
        sample(jobs, f"{key}.rows", {"model": teacher, "data": rows, "write_as": "sft", "output": written}, gpu)
    else:
        given[f"{section}.eval_data_path"] = held_out
    if name == "ppo":
        given["ppo.critic_model"] = base
    if name == "distill":
        given["ppo.teacher_model"] = teacher
    jobs.run(key, "rlhf", ["train", *flags(recipe | given)], gpu=gpu)
    answer(jobs, key, output / ("sft" if section == "sft" else "actor"), "form", gpu)


def answer(jobs: Jobs, key: str, model: object, form: str, gpu: int | None) -> None:
    """Write a model's greedy answers to all questions that are shown, and several to some of them."""
    for kind, rows, given in (("greedy", "test", {"temperature": 0}), ("t1", "sampled", {"n": NUM_ANSWERS})):
        output = jobs.folder / "answers" / f"{key}.{kind}.jsonl"
        words = {"model": model, "data": jobs.folder / "data" / f"gsm8k_{form}_{rows}.jsonl", "output": output}
        sample(jobs, f"{key}.{kind}", words | given, gpu)


def sample(jobs: Jobs, name: str, words: dict[str, Any], gpu: int | None) -> None:
    """Write answers of a model with their rewards; a finished file stays."""
    shared = {"reward_function": "right_number", "max_new_tokens": MAX_ANSWER, "batch_size": 200}
    jobs.run(name, "rlhf", ["sample", *flags(shared | words)], gpu=gpu)
