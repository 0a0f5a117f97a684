"""Flags that stages and models share, each seen in the built engines and DeepSpeed JSONs of every stage and every role.

What a run alone shows (data, checkpoints, evaluations) is in tests/faults/flag_tests.py.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from input_calls import EXIT_LOADED, call, make_inputs, stage_words
from peft.tuners.lora import LoraLayer
from support.marks import slow_but
from support.messages import naming
from support.tiny_run import save_base, save_scorer
from transformers import AutoTokenizer

from pipeline.configuration.ds_config import Json, Placement
from pipeline.configuration.flags import parse
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import EnvironmentFault
from pipeline.kernels.int8_linear import Int8Linear
from pipeline.models.loading import base_model
from step1_sft import training as sft_training
from step1_sft.config import SFTConfig
from step2_reward import training as reward_training
from step2_reward.config import RewardConfig
from step3_dpo import training as dpo_training
from step3_dpo.config import DPOConfig
from step3_ppo import training as ppo_training
from step3_ppo.config import PPOConfig

BUILDERS = {"sft": sft_training, "reward": reward_training, "ppo": ppo_training, "dpo": dpo_training}
CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}
# (stage, role): the prefix of the role's flags, and the name of its engine.
ROLES = {
    ("sft", "model"): "", ("reward", "model"): "", ("ppo", "actor"): "actor_", ("ppo", "critic"): "critic_",
    ("dpo", "model"): "",
}  # fmt: skip
EACH_ROLE = pytest.mark.parametrize(("stage", "role"), ROLES, ids=lambda value: value)
EACH_STAGE = pytest.mark.parametrize("stage", CONFIGS)


# --- DeepSpeed JSONs ---

# Flags that only mean something together -> where the JSON says them, and what it says there.
ZERO_2 = {
    "zero_stage": (2, "zero_optimization.stage", 2),
    "offload_optimizer": ("cpu", "zero_optimization.offload_optimizer.device", "cpu"),
}
ZERO_3 = {
    "zero_stage": (3, "zero_optimization.stage", 3),
    "offload_weights": ("cpu", "zero_optimization.offload_param.device", "cpu"),
}
OF_ALL_AT_2 = {
    "offload": ("true", "zero_optimization.offload_optimizer.device", "cpu"),
    "max_grad_norm": (0.5, "gradient_clipping", 0.5),
    "per_device_train_batch_size": (3, "train_micro_batch_size_per_gpu", 3),
    "gradient_accumulation_steps": (5, "gradient_accumulation_steps", 5),
}
OF_ALL_AT_3 = {
    "stage3_max_live_parameters": (5, "zero_optimization.stage3_max_live_parameters", 5),
    "sub_group_size": (3, "zero_optimization.sub_group_size", 3),
    "offload_parameters": ("true", "zero_optimization.offload_param.device", "cpu"),
}
OF_FP16 = {"dtype": ("fp16", "fp16.enabled", True)}


def jsons(stage: str, words: list[object]) -> dict[str, Json]:
    """The DeepSpeed JSON of each engine of a stage on a GPU."""
    resolved = parse(CONFIGS[stage], [str(word) for word in words], section=stage)
    dtype = resolved.config.deepspeed.dtype
    dtype = "bf16" if dtype == "auto" else dtype
    place = Placement(device="cuda", dtype=dtype, ranks=2, run_dir=Path("run"))
    return resolved.config.engine_jsons(resolved.origins, place)


def said(json: Json, path: str) -> Any:
    for key in path.split("."):
        json = json.get(key, {}) if isinstance(json, dict) else {}
    return json


def roles_of(stage: str) -> dict[str, str]:
    """Return the prefix of the flags of each role of a stage."""
    return {role: prefix for (its, role), prefix in ROLES.items() if its == stage}


def of_each_role(stage: str, name: str, value: object) -> list[object]:
    """Return a flag for each role of a stage."""
    return [word for prefix in roles_of(stage).values() for word in (f"--{prefix}{name}", value)]


def flags_of(stage: str, table: dict[str, tuple[Any, str, Any]], prefix: str = "") -> list[object]:
    return [word for name, (value, *_) in table.items() for word in (f"--{prefix}{name}", value)]


@EACH_ROLE
@pytest.mark.parametrize("table", [ZERO_2, ZERO_3], ids=["ZeRO-2", "ZeRO-3"])
def test_the_json_of_a_role_has_its_own_flags(stage: str, role: str, table: dict[str, tuple[Any, str, Any]]) -> None:
    plain, changed = jsons(stage, []), jsons(stage, flags_of(stage, table, ROLES[stage, role]))
    for name, (_, path, expected) in table.items():
        assert said(plain[role], path) != expected == said(changed[role], path), name
    others = set(plain) - {role, *{"critic": ["reward model"]}.get(role, ["reference"])}
    assert {other: changed[other] for other in others} == {other: plain[other] for other in others}


@EACH_STAGE
@pytest.mark.parametrize(
    ("table", "zero_stage", "rollout"),
    [(OF_ALL_AT_2, 2, 15), (OF_ALL_AT_3, 3, 16), (OF_FP16, 0, 16)],
    ids=["ZeRO-2", "ZeRO-3", "fp16"],
)
def test_the_jsons_of_all_that_is_trained_have_the_flags_of_all(
    stage: str, table: dict[str, tuple[Any, str, Any]], zero_stage: int, rollout: int
) -> None:
    """`rollout`: rows of which the steps of this table are a part."""
    plain = of_each_role(stage, "zero_stage", zero_stage)
    rows = ["--per-device-generation-batch-size", rollout] if stage == "ppo" else []
    without, given = jsons(stage, plain), jsons(stage, [*plain, *flags_of(stage, table), *rows])
    for role in roles_of(stage):
        for name, (_, path, expected) in table.items():
            assert said(without[role], path) != expected == said(given[role], path), (role, name)


# --- engines ---


@dataclass(frozen=True, slots=True)
class Built:
    """A stage as its loop would get it."""

    engines: dict[str, TrainingEngine]
    rate: Callable[[int], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of a tiny run, and models with other weights."""
    folder = make_inputs(tmp_path_factory.mktemp("flags"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    save_base(folder / "other", tokenizer, seed=3)
    save_scorer(folder / "other-scorer", tokenizer, seed=5)
    return folder


def read(stage: str, words: list[object], folder: Path, out: Path, look: Callable[[Built], Any]) -> Any:
    """Build a stage by its command line, and return what is looked at; nothing is trained."""
    module, seen = BUILDERS[stage], []
    build = module.build

    def build_and_look(run: Any, config: Any) -> Any:
        built = build(run, config)
        stays = built[0] if isinstance(built, tuple) else built
        if stage == "ppo":
            seen.append(look(Built(stays.models.trained, stays.updater.rate)))
        else:
            seen.append(look(Built({"model": stays.engine}, stays.rate)))
        raise EnvironmentFault("built")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(module, "build", build_and_look)
        ending = call(stage, [*stage_words(stage, folder, out, data_output_path=folder / "cache", max_steps=8), *words])
    assert ending.code == EXIT_LOADED and seen, ending.stderr
    shutil.rmtree(out, ignore_errors=True)
    return seen[0]


def adapter(engine: TrainingEngine) -> LoraLayer:
    return next(layer for layer in engine.module.modules() if isinstance(layer, LoraLayer))


def group(engine: TrainingEngine, name: str) -> dict[str, Any]:
    return next(group for group in engine.optimizer.param_groups if group["name"] == name)


def first_weights(engine: TrainingEngine) -> float:
    """A sum that tells one start from another."""
    names = dict(engine.module.named_parameters())
    return round(float(next(weight for name, weight in names.items() if "fc1" in name).detach().sum()), 4)


def with_lora(layer: str) -> Callable[[TrainingEngine], bool]:
    """Return whether layers of this name have an adapter."""
    return lambda engine: any(layer in name for name, _ in engine.module.named_parameters() if "lora_" in name)


# Flag of a role -> its value, and what an engine says that has it; None: other than the engine of a run without it.
OF_A_ROLE: dict[str, tuple[Any, Callable[[TrainingEngine], Any], Any]] = {
    "learning_rate": (0.125, lambda engine: group(engine, "decay")["lr"], 0.125),
    "weight_decay": (0.25, lambda engine: group(engine, "decay")["weight_decay"], 0.25),
    "gradient_checkpointing": ("true", lambda e: base_model(e.module.model).is_gradient_checkpointing, True),
    "attn_implementation": ("eager", lambda e: base_model(e.module.model).config._attn_implementation, "eager"),
    "model_name_or_path": ("@", first_weights, None),
}
OF_AN_ADAPTER: dict[str, tuple[Any, Callable[[TrainingEngine], Any], Any]] = {
    "lora_dim": (2, lambda engine: next(iter(adapter(engine).r.values())), 2),
    "lora_alpha": (64.0, lambda engine: next(iter(adapter(engine).lora_alpha.values())), 64.0),
    "lora_module_name": ("q_proj", with_lora("v_proj"), False),
    "lora_learning_rate": (0.375, lambda engine: group(engine, "lora")["lr"], 0.375),
    "quantization": ("int8", lambda e: any(isinstance(layer, Int8Linear) for layer in e.module.modules()), True),
}
# Of steps 1 to 8, of which four warm up: up to 1 in the fifth, then in a line towards 0.5.
RATES = (0.2, 0.4, 0.6, 0.8, 1.0, 0.875, 0.75, 0.625)
DROPOUT = {
    "lora_dropout": (0.5, lambda e: getattr(next(iter(adapter(e).lora_dropout.values())), "p", 0.0), 0.5)
}  # none in stage 3


@EACH_ROLE
@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_the_engine_of_a_role_has_its_own_flags(stage: str, role: str, kind: str, folder: Path, tmp_path: Path) -> None:
    """Without the flags of adapters all roles have adapters of rank 4."""
    prefix = ROLES[stage, role]
    table = {"weights": OF_A_ROLE, "adapters": OF_AN_ADAPTER | ({} if stage == "ppo" else DROPOUT)}[kind]
    start = folder / ("other-scorer" if role == "critic" else "other")
    given = {f"--{prefix}{name}": start if value == "@" else value for name, (value, *_) in table.items()}
    plain = {f"--{its}lora_dim": 4 for its in roles_of(stage).values()} if kind == "adapters" else {}

    def look(built: Built) -> dict[str, dict[str, Any]]:
        return {name: {flag: table[flag][1](engine) for flag in table} for name, engine in built.engines.items()}

    without, found = (
        read(stage, [word for pair in words.items() for word in pair], folder, tmp_path / str(n), look)
        for n, words in enumerate((plain, plain | given))
    )
    for name, (_, _, expected) in table.items():
        changed, before = found[role].pop(name), without[role].pop(name)
        assert changed != before if expected is None else before != expected == changed, name
    assert found == without, "another role has them"


@EACH_STAGE
def test_the_optimizers_of_all_that_is_trained_have_the_flags_of_all(stage: str, folder: Path, tmp_path: Path) -> None:
    def look(built: Built) -> tuple[list[Any], list[float]]:
        groups = [group(engine, "decay") for engine in built.engines.values()]
        return [(one["betas"], one["eps"]) for one in groups], [built.rate(step) for step in range(8)]

    words = ["--adam-beta1", 0.5, "--adam-beta2", 0.75, "--adam-eps", 0.25, "--lr-scheduler-type", "linear",
             "--num-warmup-steps", 4, "--min-learning-rate-ratio", 0.5]  # fmt: skip
    optimizers, rates = read(stage, words, folder, tmp_path, look)
    assert optimizers == [((0.5, 0.75), 0.25)] * len(roles_of(stage))
    assert rates == pytest.approx(RATES)


@EACH_STAGE
@pytest.mark.parametrize("only", ["true", "false"])
def test_only_adapters_learn_unless_the_flag_says_otherwise(
    stage: str, only: str, folder: Path, tmp_path: Path
) -> None:
    def look(built: Built) -> list[bool]:
        named = [pair for engine in built.engines.values() for pair in engine.module.named_parameters()]
        return [weight.requires_grad for name, weight in named if name.endswith("fc1.base_layer.bias")]

    words = [*of_each_role(stage, "lora_dim", 2), "--only-optimize-lora", only]
    learns = read(stage, words, folder, tmp_path, look)
    assert len(learns) >= len(roles_of(stage)) and set(learns) == {only == "false"}


@pytest.mark.parametrize("stage", slow_but(["sft"], list(CONFIGS)))
def test_a_warm_up_as_long_as_the_run_is_noted(stage: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Of a run of two steps, which ends after its banner."""

    def end(*_: object, **__: object) -> None:
        raise EnvironmentFault("banner shown")

    monkeypatch.setattr("pipeline.training.run_control.Recorder", end)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = stage_words(stage, folder, tmp_path, data_output_path=folder / "cache", max_steps=2)
    ending = call(stage, [*words, "--num-warmup-steps", 2])
    assert ending.code == EXIT_LOADED, ending.stderr
    said = naming("--num-warmup-steps 2 ... 2 steps ... less, or more steps")
    assert ending.stderr == said
