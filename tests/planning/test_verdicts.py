"""Verdicts of the remedies beside an exhaustive search over all combinations of its levers.

Both ask the planner's rules of memory for models that exist as sizes alone: a formula in this file takes the place of
passes on the meta device, so that no model is built. It need not be near: what is compared is the search.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.marks import rare_but
from transformers import LlamaConfig

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import parse
from pipeline.configuration.origins import COMMAND_LINE
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved, validated
from pipeline.errors import RunError
from pipeline.generation.options import GenerationOptions
from pipeline.launching.target import parse_target
from pipeline.planning import disk, memory
from pipeline.planning.changes import fewer_prompts_at_once
from pipeline.planning.measurement import ModelSize
from pipeline.planning.needs import ModelUse, Pass
from pipeline.planning.page import StagePlanner, fits
from pipeline.planning.remedies import Remedies
from pipeline.preparation.engine_jsons import engine_jsons
from rlhf.stages import stage_of
from step3_ppo.models import needs as ppo_needs


class Shape(NamedTuple):
    """Layers, widths and vocabulary of a published model."""

    layers: int
    hidden: int
    kv_width: int
    mlp: int
    vocabulary: int
    tied: bool


SHAPES = {
    "smollm2-135m": Shape(30, 576, 192, 1536, 49152, True),
    "smollm2-360m": Shape(32, 960, 320, 2560, 49152, True),
    "qwen2.5-0.5b": Shape(24, 896, 128, 4864, 151936, True),
    "qwen3-0.6b": Shape(28, 1024, 1024, 3072, 151936, True),
    "llama-3.2-1b": Shape(16, 2048, 512, 8192, 128256, True),
    "tinyllama-1.1b": Shape(22, 2048, 256, 5632, 32000, False),
    "qwen2.5-1.5b": Shape(28, 1536, 256, 8960, 151936, True),
    "qwen3-1.7b": Shape(28, 2048, 1024, 6144, 151936, True),
    "smollm2-1.7b": Shape(24, 2048, 2048, 8192, 49152, True),
    "qwen2.5-3b": Shape(36, 2048, 256, 11008, 151936, True),
    "llama-3.2-3b": Shape(28, 3072, 1024, 8192, 128256, True),
    "qwen3-4b": Shape(36, 2560, 1024, 9728, 151936, True),
    "llama-2-7b": Shape(32, 4096, 4096, 11008, 32000, False),
    "mistral-7b": Shape(32, 4096, 1024, 14336, 32768, False),
    "qwen2.5-7b": Shape(28, 3584, 512, 18944, 152064, False),
    "llama-3.1-8b": Shape(32, 4096, 1024, 14336, 128256, False),
    "qwen3-8b": Shape(36, 4096, 1024, 12288, 151936, False),
    "llama-2-13b": Shape(40, 5120, 5120, 13824, 32000, False),
    "qwen3-14b": Shape(40, 5120, 1024, 17408, 151936, False),
    "qwen3-32b": Shape(64, 5120, 1024, 25600, 151936, False),
}
CARDS = ("16GB", "24GB", "RTX5090", "A6000", "H100")
ROWS = "--per-device-train-batch-size 8 --gradient-accumulation-steps 1 --dtype bf16"
PROMPTS = "--per-device-generation-batch-size 8 --max-prompt-seq-len 512 --max-answer-seq-len 512 --num-warmup-steps 0"
METHODS = {
    "sft": ("sft", f"--model-name-or-path MODEL --max-seq-len 2048 {ROWS}"),
    "reward": ("reward", f"--model-name-or-path MODEL --max-seq-len 1024 {ROWS}"),
    "dpo": ("dpo", f"--model-name-or-path MODEL --max-seq-len 1024 {ROWS}"),
    "grpo": ("ppo", f"--method grpo --reward-function repetition --actor-model-name-or-path MODEL {ROWS} {PROMPTS} "
             "--num-samples-per-prompt 8"),
    "ppo": ("ppo", f"--actor-model-name-or-path MODEL --critic-model-name-or-path MODEL {ROWS} {PROMPTS}"),
}  # fmt: skip
Case = tuple[str, str, str]
BUFFERS = ("stage3_max_live_parameters", "sub_group_size")
Lever = tuple[dict[str, Any], ...]
# Values of levers, of batches the least and the most: what is between takes memory between theirs.
SHARED: tuple[Lever, ...] = (
    tuple({"per_device_train_batch_size": n, "gradient_accumulation_steps": 8 // n} for n in (1, 8)),
    ({}, {"offload": True}),
    (dict.fromkeys(BUFFERS, 50_000_000), {}),
)
EVALUATED: Lever = ({"per_device_eval_batch_size": 1}, {})  # stage 3 evaluates by sampling
RECOMPUTED: Lever = ({"gradient_checkpointing": True}, {})  # of all trained models
OF_EACH: tuple[Lever, ...] = (
    ({"lora_dim": 16, "quantization": "int8"}, {"lora_dim": 16}, {}),
    ({"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 3, "offload_weights": "cpu"}),
)
OF_ROLLOUTS: tuple[Lever, ...] = (
    tuple({"per_device_generation_batch_size": n, "generation_batches": 8 // n} for n in (1, 8)),
    ({}, {"generation_engine": "static"}),
    ({}, {"offload_optimizer_during_rollout": True}),
    ({}, {"offload_reference_model": True}),
)
OF_REWARDS: Lever = (
    {"reward_model_quantization": "int8", "reward_model_zero_stage": "0"}, {"offload_reward_model": True}, {},
)  # fmt: skip


def cases() -> list[Case]:
    """60 of all models, cards and methods, drawn by hash."""
    every = product(SHAPES, CARDS, METHODS)
    return sorted(every, key=lambda case: hashlib.sha256(" ".join(case).encode()).hexdigest())[:60]


@cache
def size_of(shape: Shape, lora: int, quantization: str, trained: bool, has_values: bool) -> ModelSize:
    linear = 2 * shape.hidden * (shape.hidden + shape.kv_width) + 3 * shape.hidden * shape.mlp
    tables = shape.vocabulary * shape.hidden
    embeddings = tables * (1 if shape.tied or has_values else 2)
    of_linear = shape.layers * linear
    adapters = shape.layers * lora * (6 * shape.hidden + 2 * shape.kv_width + 3 * shape.mlp) if trained else 0
    weights = of_linear + embeddings + adapters
    num_bytes = 2 * (embeddings + adapters) + of_linear * (1 if quantization == "int8" else 2)
    trains = (adapters or weights) if trained else 0
    return ModelSize(weights, trains, embeddings, of_linear, tables, linear, num_bytes, 2, tables if shape.tied else 0)


def model_size(use: ModelUse, dtype: str) -> ModelSize:
    settings = use.settings
    lora = settings.lora_dim if use.trained else 0
    return size_of(SHAPES[use.path], lora, settings.quantization, use.trained, use.has_values)


def peak_bytes(use: ModelUse, dtype: str, work: Pass) -> int:
    """Inputs of layers, or all that they keep; logits of 8,192 tokens; gradients where none exist before."""
    shape, tokens = SHAPES[use.path], work.rows * work.length
    of_layer = tokens * 2 * (8 * shape.hidden + 3 * shape.kv_width + 3 * shape.mlp)
    logits = 2 * 2 * min(work.num_head_tokens, 8192) * shape.vocabulary
    if not work.trains:
        return of_layer + logits
    kept = tokens * 2 * shape.hidden if use.settings.gradient_checkpointing else of_layer
    gradients = 0 if work.accumulates else 2 * model_size(use, dtype).trained
    return max(shape.layers * kept + max(of_layer, logits), gradients)


def backend_of(actor: ModelUse, dtype: str, options: GenerationOptions, device: object) -> str:
    return "static" if options.backend == "static" else "fused"


def decode_needs(actor: ModelUse, dtype: str, options: GenerationOptions, ranks: int) -> ppo_needs.DecodeNeeds | None:
    """Adapters are merged into a copy of the linear layers; else queries, keys and values are copied together."""
    if backend_of(actor, dtype, options, None) == "static":
        return None
    shape, whole = SHAPES[actor.path], 2 * model_size(actor, dtype).linear
    copied = 2 * shape.layers * shape.hidden * (shape.hidden + 2 * shape.kv_width)
    if actor.settings.quantization != "none":
        copied = 0
    elif actor.settings.lora_dim or actor.settings.zero_stage == 3:
        copied = whole
    return ppo_needs.DecodeNeeds(copied, 9 * shape.layers)


@cache
def planned_config(path: str) -> LlamaConfig:
    shape = SHAPES[path]
    return LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.kv_width // 64, head_dim=64, intermediate_size=shape.mlp, vocab_size=shape.vocabulary,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def without_models(monkeypatch: pytest.MonkeyPatch):
    for module, names in ((memory, ("model_size", "peak_bytes")), (disk, ("model_size",)),
                          (ppo_needs, ("model_size", "backend_of", "decode_needs", "planned_config"))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, globals()[name])
    monkeypatch.setattr(ppo_needs, "count_pass", lambda *_: SimpleNamespace(kernels={}))
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)
    monkeypatch.setattr("pipeline.planning.measurement.build", None)


def planned(case: Case, more: str = "") -> tuple[StagePlanner, Resolved]:
    model, card, method = case
    section, words = METHODS[method]
    stage, target = stage_of(section), parse_target(card)
    given = [*words.replace("MODEL", model).split(), *more.split(), "--target", card]
    planner = StagePlanner(stage.needs, partial(engine_jsons, stage, ranks=1), {}, target)
    return planner, with_ranks(parse(stage.config, given, section=section), 1)


def levers(resolved: Resolved) -> Iterator[dict[str, Any]]:
    """Yield every combination of values of the levers that the stage has."""
    values = dict(flat_items(resolved.config))
    prefixes = [prefix for prefix in ("", "actor_", "critic_") if f"{prefix}lora_dim" in values]
    if "critic_lora_dim" in values and not resolved.config.method.has_critic:
        prefixes.remove("critic_")
    of_each = [
        tuple({f"{prefix}{name}": value for name, value in one.items()} for one in lever)
        for prefix in prefixes
        for lever in OF_EACH
    ]
    recomputed = tuple({f"{p}{name}": True for p in prefixes for name in one} for one in RECOMPUTED)
    rollouts = OF_ROLLOUTS if "generation_batches" in values else (EVALUATED,)
    rewards = [OF_REWARDS] if len(rollouts) > 1 and resolved.config.has_reward_model else []
    for combination in product(*SHARED, recomputed, *of_each, *rollouts, *rewards):
        yield {name: value for one in combination for name, value in one.items()}


def fits_with(planner: StagePlanner, resolved: Resolved, flags: Mapping[str, Any]) -> bool:
    """Tell whether the plan fits with these values; not where they contradict each other."""
    values, origins = dict(flat_items(resolved.config)), resolved.origins | dict.fromkeys(flags, COMMAND_LINE)
    try:
        config: Any = validated(type(resolved.config), values | dict(flags), origins)
        settings = with_ranks(Resolved(config, origins), 1)
        planner.cached.clear()
        return fits(planner.memory(settings), planner.target)
    except RunError:
        return False


def check(case: Case, more: str = "") -> bool:
    """Compare the verdict of a case with the search's; return whether it fits, if need be with changes."""
    planner, resolved = planned(case, more)
    if fits(planner.memory(resolved), planner.target):
        return True
    remedies = Remedies.of(planner, resolved)
    enough = [one for one in (remedies.same, remedies.another) if one and one.is_enough]
    for remedy in enough:
        assert fits_with(planner, resolved, remedy.flags), (case, remedy.flags)
    if not enough:
        missed = next((flags for flags in levers(resolved) if fits_with(planner, resolved, flags)), None)
        assert missed is None, (case, missed)
    return bool(enough)


@pytest.mark.parametrize(
    "case, does_fit",
    [
        (("qwen3-0.6b", "16GB", "sft"), True),
        (("qwen3-32b", "24GB", "sft"), True),
        (("qwen3-8b", "24GB", "grpo"), True),
        (("llama-2-7b", "16GB", "grpo"), True),  # by no change that frees memory by itself
        pytest.param(("qwen3-14b", "16GB", "grpo"), False, marks=pytest.mark.slow),
    ],
)
def test_a_verdict_is_that_of_an_exhaustive_search(case, does_fit):
    assert check(case) == does_fit


def test_two_prompts_at_once_and_an_int8_base_are_found_behind_a_cache_that_fills_what_is_left():
    """Neither frees memory of a rollout by itself until the cache has all the rows that it wants."""
    planner, resolved = planned(("qwen3-8b", "24GB", "grpo"), "--actor-lora-dim 16")
    another = Remedies.of(planner, resolved).another
    assert another is not None and another.is_enough
    assert another.flags["actor_quantization"] == "int8"
    assert another.flags["per_device_generation_batch_size"] in (1, 2, 4)


def test_adapters_of_the_critic_alone_are_an_answer():
    """The actor has some already; the critic's gradients and optimizer states are what does not fit."""
    planner, resolved = planned(("llama-3.2-1b", "24GB", "ppo"), "--actor-lora-dim 16")
    assert not fits(planner.memory(resolved), planner.target)
    another = Remedies.of(planner, resolved).another
    assert another is not None and another.is_enough and another.flags == {"critic_lora_dim": 16}
    assert str(another.changes[0]).startswith("--critic-lora-dim 16: ")
    assert fits_with(planner, resolved, another.flags)


def test_a_backend_without_copies_gathers_all_weights_that_are_on_the_host():
    for backend, is_whole in (("static", True), ("auto", False)):
        more = f"--actor-zero-stage 3 --actor-offload-weights cpu --generation-engine {backend}"
        planner, resolved = planned(("qwen3-8b", "H100", "grpo"), more)
        plan = planner.memory(resolved)
        assert plan.phases["generate"].gathered == (plan.sizes["actor"].num_bytes if is_whole else 0)


@pytest.mark.parametrize("prompts, more, smaller", [
    (8, "", {"per_device_generation_batch_size": 4, "generation_batches": 2}), (1, "", {}),
    (6, "--rollout-batch-size 144 --per-device-train-batch-size 18", {"per_device_generation_batch_size": 3}),
    (8, "--generation-batches 3", {"per_device_generation_batch_size": 4, "generation_batches": 6}),
])  # fmt: skip
def test_prompts_at_once_are_halved_to_a_divisor_of_those_of_a_rollout(prompts, more, smaller):
    """18 prompts are 6 x 3: 3 at once leave as many."""
    _, resolved = planned(("qwen3-0.6b", "24GB", "grpo"), f"{more} --per-device-generation-batch-size {prompts}")
    before = resolved.config.rollout_size(1)
    found = fewer_prompts_at_once(dict(flat_items(resolved.config)), parse_target("24GB"))
    assert found == smaller
    values, origins = dict(flat_items(resolved.config)) | found, resolved.origins | dict.fromkeys(found, COMMAND_LINE)
    config: Any = validated(type(resolved.config), values, origins)
    assert with_ranks(Resolved(config, origins), 1).config.rollout_size(1).responses == before.responses


# Three of them take a minute and more each.
@pytest.mark.parametrize("number", rare_but({*range(60)} - {8, 9, 14}, range(60)))
def test_sixty_verdicts_are_those_of_an_exhaustive_search(number):
    check(cases()[number])


def test_the_folder_of_no_model_is_there():
    assert not any(Path(name).exists() for name in SHAPES)
