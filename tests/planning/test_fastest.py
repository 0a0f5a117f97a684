"""What the plan chooses for flags that are `auto`, beside a search through all settings, each given by hand."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.speed.planned import planner_of
from pipeline.configuration.flags import flag_words, parse
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.stage import Stage
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.fastest import ALIKE, Candidate, auto_flags, choice_text, fastest, smallest, stages_to_try
from pipeline.planning.page import StagePlanner, lacking
from pipeline.preparation.plans import choose, stage_planner
from step1_sft.stage import STAGE as SFT
from step3_ppo.stage import STAGE as PPO

SIZES = (1, 2, 4, 8, 16, 32)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("actor", 4), ("critic", 2)):
        LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=8192,
        ).save_pretrained(folder / name)  # fmt: skip
    return folder


def given(stage: Stage, models: Path, *words: object, ranks: int = 1, zero_stage: int | None = 0) -> Any:
    """Settings of a command line; zero_stage: that of each trained model, None: left to the plan."""
    roles = ("actor_", "critic_") if stage is PPO else ("",)
    zero = [word for role in roles for word in (f"--{role}zero_stage", "auto" if zero_stage is None else zero_stage)]
    paths = ["--model-name-or-path", models / "actor", "--max-seq-len", 512]
    if stage is PPO:
        paths = ["--actor-model-name-or-path", models / "actor", "--critic-model-name-or-path", models / "critic"]
    argv = [str(word) for word in (*paths, *zero, "--data-path", "none.jsonl", "--output-dir", models / "out", *words)]
    return with_ranks(parse(stage.config, argv, section=stage.section), ranks)


def gpu(memory: float, *slots: int, speed: float = 1.0) -> Target:
    """A GPU so slow that its kernels, not the host, take the time of a step; `speed` times as fast."""
    return Target("GPU", int(memory), slots or (1,), tb_per_s=0.05 * speed, tflops=20.0 * speed)


def by_hand(
    stage: Stage, models: Path, target: Target, flags: dict[str, Any], *words: object
) -> tuple[float, int, int]:
    """Return seconds, high estimate and lacking bytes of settings whose flags are given."""
    ranks = target.num_gpus
    planner, resolved = stage_planner(stage, given(stage, models, *words, *flag_words(flags), ranks=ranks), target, {})
    plan, needs = planner.memory(resolved), planner.needs(resolved)
    seconds = sum(planner.seconds(resolved, plan).values())
    return seconds / needs.steps_each, plan.reserved()[0], sum(lacking(plan, target, high=True))


def searched(stage: Stage, models: Path, target: Target, *words: object, **others: Any) -> dict[str, Any]:
    """Return the flags that a search through all micro-batches and recomputed models takes."""
    switches = (
        ["gradient_checkpointing"]
        if stage is SFT
        else ["actor_gradient_checkpointing", "critic_gradient_checkpointing"]
    )
    tried = []
    for size, number in product(SIZES, range(len(switches) + 1)):
        flags = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 32 // size, **others}
        flags |= {name: place < number for place, name in enumerate(switches)}
        flags["per_device_eval_batch_size"] = max(16, size) if stage is PPO else min(32, 4 * size)
        seconds, memory, lacks = by_hand(stage, models, target, flags, *words)
        if not lacks:
            tried.append((seconds, size, memory, flags))
    least = min(seconds for seconds, *_ in tried)
    alike = [one for one in tried if one[0] <= ALIKE * least]
    return max(alike, key=lambda one: (one[1], -one[2]))[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "speed", "size", "recomputes"),
    [
        (1.35, 1.0, 1, True),
        (1.7, 1.0, 8, False),
        (2.5, 1.0, 32, False),
        (1.7, 8.9, 32, True),
        (1.7, 100.0, 32, True),
    ],
)
def test_a_micro_batch_and_checkpointing_as_a_search_by_hand_finds_them(models, gib, speed, size, recomputes):
    """On a GPU so fast that the host takes the time of a step, fewer launches are worth recomputed activations.

    At a speed of 8.9 they take 2 % longer, which is alike: the larger micro-batch is taken.
    """
    target, words = gpu(gib * GIB, speed=speed), ("--gradient-accumulation-steps", 2)
    choice = fastest(*stage_planner(SFT, given(SFT, models, *words), target, {}))
    expected = searched(SFT, models, target)
    assert choice.flags == expected
    assert (choice.micro_batch, choice.flags["gradient_checkpointing"]) == (size, recomputes)
    seconds, memory, _ = by_hand(SFT, models, target, expected)
    assert (choice.seconds, choice.plan.reserved()[0]) == (seconds, memory)
    optimizer = choice.resolved.config.optimizer
    assert optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps == 32


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "released"), [(1.65, False), (1.75, False), (2.0, True), (2.5, False)])
def test_ppo_as_a_search_by_hand_finds_it(models, gib, released):
    target = gpu(gib * GIB)
    words = ("--max-answer-seq-len", 256, "--release-inference-cache", str(released).lower())
    choice = fastest(*stage_planner(PPO, given(PPO, models, "--train-batch-size", 32, *words), target, {}))
    others = {"per_device_generation_batch_size": 32, "rollout_batch_size": 32}
    expected = searched(PPO, models, target, *words, **others)
    assert choice.flags == {name: value for name, value in expected.items() if name != "rollout_batch_size"}
    assert choice.seconds == by_hand(PPO, models, target, expected, *words)[0]


@pytest.mark.slow
def test_a_cache_that_will_not_stay_is_given_back_from_the_first_rollout_on():
    """Mistral-7B with LoRA, 80 rows: an update and the cache and copied weights take 62.6 and 21.8 GiB."""
    words = (
        "--actor-model-name-or-path mistral-7b --critic-model-name-or-path qwen3-0.6b --actor-lora-dim 32 "
        "--max-prompt-seq-len 320 --max-answer-seq-len 576 --per-device-generation-batch-size 80 --dtype bf16 "
        "--per-device-train-batch-size 10 --gradient-accumulation-steps 8 --rollout-batch-size 80 "
        "--actor-gradient-checkpointing false --critic-gradient-checkpointing false"
    )
    choices = []
    for target, rest in (("1xH200", ""), ("1xH100-80GB", ""), ("1xH100-80GB", " --release-inference-cache true")):
        choice = fastest(*planner_of("ppo", words + rest, target, StagePlanner))
        choices.append(choice)
        assert not choice.lacks and choice.plan.keeps_buffers == bool(choice.plan.phases["train"].rollout)
    assert [choice.flags.get("release_inference_cache") for choice in choices] == [False, True, None]
    assert "--release-inference-cache true" in choices[1].line
    assert choices[1].plan.phases == choices[2].plan.phases and choices[1].seconds == choices[2].seconds


@pytest.mark.parametrize(("released", "tried"), [(False, [32, 16]), (True, [32, 16, 8])])
def test_fewer_prompts_at_once_are_tried_as_long_as_they_may_gain(models, monkeypatch, released, tried):
    """Half of the prompts take 7 % longer, and 0.3 s less at most where a cache that was given back might stay."""
    prompts, of = list[int](), Candidate.of

    def noted(planner: Any, resolved: Any, flags: Any) -> Candidate:
        prompts.append(flags["per_device_generation_batch_size"])
        return of(planner, resolved, flags)

    monkeypatch.setattr(Candidate, "of", noted)
    words = ("--train-batch-size", 32, "--max-answer-seq-len", 256, "--release-inference-cache", str(released).lower())
    choice = fastest(*stage_planner(PPO, given(PPO, models, *words), gpu(1.75 * GIB), {}))
    assert list(dict.fromkeys(prompts)) == tried
    assert choice.flags["per_device_generation_batch_size"] == 32


def test_each_smaller_gpu_takes_a_smaller_micro_batch_then_recomputes(models):
    taken = []
    for gib in (2.5, 2.0, 1.7, 1.4, 1.35, 0.5):
        choice = fastest(*stage_planner(SFT, given(SFT, models, "--train-batch-size", 32), gpu(gib * GIB), {}))
        taken.append((choice.micro_batch, choice.flags["gradient_checkpointing"], choice.lacks > 0))
    sizes = [(32, False, False), (16, False, False), (8, False, False), (2, False, False), (1, True, False)]
    assert taken[:-1] == sizes and taken[-1][2], "nothing fits into the last one"


@pytest.mark.parametrize("stage", [SFT, PPO])
def test_where_times_are_not_known_no_more_is_recomputed_than_has_to_be(models, stage):
    """In fp32, or on a GPU without a data sheet; nor are fewer prompts sampled at once."""
    words = ("--train-batch-size", 32, *(("--max-answer-seq-len", 256) if stage is PPO else ()))
    choice = fastest(*stage_planner(stage, given(stage, models, *words), Target("GPU", int(1.7 * GIB)), {}))
    assert not choice.seconds and not choice.lacks and 1 < choice.micro_batch < 32
    assert not any(value for name, value in choice.flags.items() if name.endswith("gradient_checkpointing"))
    assert choice.flags.get("per_device_generation_batch_size", 32) == 32


def test_a_flag_that_is_given_wins_and_the_word_auto_gives_none(models):
    target = gpu(4 * GIB)

    def chosen(*words: object) -> dict[str, Any]:
        return fastest(*stage_planner(SFT, given(SFT, models, *words), target, {})).flags

    usual = chosen("--gradient-accumulation-steps", 2)
    assert (usual["per_device_train_batch_size"], usual["gradient_checkpointing"]) == (32, False)
    micro = chosen("--gradient-accumulation-steps", 2, "--per-device-train-batch-size", 4)
    assert micro.keys() == usual.keys() - {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert "gradient_checkpointing" not in chosen("--gradient-checkpointing", "true")
    assert "per_device_eval_batch_size" not in chosen("--per-device-eval-batch-size", 3)
    words = ("--per-device-train-batch-size", "auto", "--gradient-checkpointing", "auto")
    assert chosen("--gradient-accumulation-steps", 2, *words) == usual


def test_all_prompts_of_a_rollout_are_sampled_at_once_unless_a_flag_says_its_size(models):
    def at_once(*words: object, ranks: int = 1) -> int | None:
        target = gpu(8 * GIB, ranks)
        return fastest(*stage_planner(PPO, given(PPO, models, *words, ranks=ranks), target, {})).flags.get(
            "per_device_generation_batch_size"
        )

    assert at_once("--train-batch-size", 32) == 32
    assert at_once("--train-batch-size", 32, "--num-samples-per-prompt", 4) == 8
    assert at_once("--train-batch-size", 32, "--rollout-batch-size", 128, ranks=2) == 64
    assert at_once("--train-batch-size", 32, "--generation-batches", 2) is None, "its product is the rollout"
    assert at_once("--train-batch-size", 32, "--per-device-generation-batch-size", 8) is None


@pytest.mark.slow
def test_fewer_than_eight_prompts_are_sampled_at_once_only_where_no_more_fit(models):
    """A group of 64 responses of 2,048 tokens: the KV cache is most of the memory."""
    words = ("--num-samples-per-prompt", 64, "--max-answer-seq-len", 2048, "--rollout-batch-size", 1024)
    for gib, has_fewer in ((6.0, False), (2.6, True)):
        choice = fastest(*stage_planner(PPO, given(PPO, models, *words), gpu(gib * GIB), {}))
        assert not choice.lacks and (choice.flags["per_device_generation_batch_size"] < 8) == has_fewer


@pytest.mark.parametrize(
    ("words", "slots", "evaluated"),
    [
        ("", 32, 32),
        ("--per-device-generation-batch-size 8 --rollout-batch-size 32", 8, 8),
        ("--per-device-generation-batch-size 2 --rollout-batch-size 32 --num-samples-per-prompt 4", 8, 8),
        ("--per-device-generation-batch-size 16 --generation-batches 2", 16, 16),
        ("--per-device-generation-batch-size 8 --generation-batches 4", 8, 8),
        ("--per-device-generation-batch-size 8 --rollout-batch-size 32 --per-device-eval-batch-size 16", 16, 16),
    ],
)
def test_no_more_rows_are_sampled_at_once_than_a_flag_says(models, words, slots, evaluated):
    """An evaluation's rows are sampled in as many slots: it has no more, unless a flag says that too."""
    words = ["--train-batch-size", 32, "--per-device-train-batch-size", 32, *words.split()]
    best = fastest(*stage_planner(PPO, given(PPO, models, *words), gpu(8 * GIB), {}))
    assert best.plan.slots == slots and best.resolved.config.optimizer.per_device_eval_batch_size == evaluated


def test_rows_that_ranks_do_not_divide_are_cut_to_the_nearest_number(models):
    choice = fastest(*stage_planner(SFT, given(SFT, models, "--train-batch-size", 64, ranks=6), gpu(4 * GIB, 6), {}))
    assert (choice.micro_batch, choice.resolved.config.optimizer.gradient_accumulation_steps) == (11, 1)


def test_nothing_is_chosen_on_a_cpu_or_for_a_gpu_of_unknown_memory(models):
    for target in (Target("CPU", 8 * GIB), Target("GPU", 0)):
        planner, resolved = stage_planner(SFT, given(SFT, models), target, {})
        assert fastest(planner, resolved) is None and choose(SFT, planner, resolved).of(resolved, 1) is resolved


def test_a_batch_of_a_deepspeed_json_stays_as_it_is_cut(models, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": 2}')
    choice = fastest(*stage_planner(SFT, given(SFT, models, "--deepspeed-config", file), gpu(4 * GIB), {}))
    assert (choice.micro_batch, choice.resolved.config.optimizer.gradient_accumulation_steps) == (16, 2)


def test_nothing_is_chosen_against_a_deepspeed_json_that_says_the_default_or_what_the_preset_does(models, tmp_path):
    said = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(said))
    (tmp_path / "preset.yaml").write_text("zero_stage: 3\ntrain_batch_size: 32\n")
    words = ("--preset", tmp_path / "preset.yaml", "--deepspeed-config", tmp_path / "ds.json")
    settings = given(SFT, models, *words, zero_stage=3)
    choice = fastest(*stage_planner(SFT, settings, gpu(8 * GIB), {}))
    assert choice.flags.keys() == {"gradient_checkpointing", "per_device_eval_batch_size"}
    assert (choice.micro_batch, choice.resolved.config.model.zero_stage) == (16, 3)


def test_a_run_that_leaves_nothing_to_choose_has_a_plan_too(models):
    words = ("--per-device-train-batch-size", 4, "--per-device-eval-batch-size", 4, "--gradient-checkpointing", "false")
    planner, resolved = stage_planner(SFT, given(SFT, models, *words), gpu(8 * GIB), {})
    assert auto_flags(resolved) == []
    choice = choose(SFT, planner, resolved)
    assert (choice.flags, choice.plan["memory_gib"].keys()) == ({}, planner.memory(resolved).phases.keys())


def test_a_choice_of_the_defaults_is_said_too(models):
    words = ("--per-device-train-batch-size", 4, "--per-device-eval-batch-size", 4)
    assert choose(SFT, *stage_planner(SFT, given(SFT, models, *words), gpu(8 * GIB), {})).line.startswith(
        "the defaults ("
    )


def test_a_choice_that_does_not_fit_says_so(models):
    settings = given(SFT, models, "--train-batch-size", 32)
    lines = [choose(SFT, *stage_planner(SFT, settings, gpu(gib * GIB), {})).line for gib in (0.6, 8)]
    assert [line.endswith(" GiB by the plan, which does not fit)") for line in lines] == [True, False]


def test_the_choice_is_said_with_what_it_gives(models):
    planner, resolved = stage_planner(SFT, given(SFT, models, "--train-batch-size", 32), gpu(4 * GIB), {})
    choice = choose(SFT, planner, resolved)
    words = choice_text(choice.of(resolved, 1))
    assert words.startswith("--per-device-train-batch-size 32 --per-device-eval-batch-size 32")
    assert choice.line.startswith(f"{words} (") and "s a step and" in choice.line and "GiB by the plan" in choice.line
    origins = choice.of(resolved, 1).origins
    assert str(origins["per_device_train_batch_size"]) == "chosen for 1 x GPU, 4.0 GiB each"
    memory = planner.memory(choice.of(resolved, 1))
    train = {"allocated": memory.phases["train"].total / GIB, "reserved": [n / GIB for n in memory.reserved("train")]}
    assert choice.plan["memory_gib"]["train"] == train and choice.plan["step_s"] > 0, "for the report"
    assert choice.plan["memory_gib"].keys() == memory.phases.keys() and choice.plan["target"] == str(planner.target)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "slots", "gib", "stages"),
    [
        ("", (1,), 8, (2, 2)),
        ("", (2,), 8, (2, 2)),
        ("--offload true", (1,), 8, (2, 2)),
        ("", (1,), 0.01, (2, 2)),
        ("", (2,), 0.01, (2, 2)),
        ("--actor-zero-stage 3", (1,), 8, (3, 2)),
        ("--critic-zero-stage 0", (2,), 8, (2, 0)),
        ("--offload-parameters true", (1,), 8, (3, 3)),
        ("--actor-offload-weights cpu", (2,), 8, (3, 2)),
        ("--offload-reward-model true", (1,), 8, (2, 3)),
    ],
)
def test_zero_stages_are_2_or_3_where_that_is_needed(models, words, slots, gib, stages):
    """Where nothing fits, the stages are those that lack least: here 2, since buckets are larger than the models."""
    settings = given(PPO, models, *words.split(), ranks=sum(slots), zero_stage=None)
    choice = fastest(*stage_planner(PPO, settings, gpu(gib * GIB, *slots), {}))
    config = choice.resolved.config
    assert (config.actor.zero_stage, config.critic.zero_stage) == stages
    assert bool(choice.lacks) == (gib < 0.1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("section", "models", "gpus", "stages"),
    [
        ("sft", "--model-name-or-path mistral-7b", "8xRTX4090", [3]),
        ("sft", "--model-name-or-path olmo2-1b", "1xRTX5090", [0]),
        pytest.param("ppo", "--actor-model-name-or-path mistral-7b --critic-model-name-or-path qwen3-0.6b", "8xL40S",
                     [3, 2], marks=pytest.mark.slow),
        pytest.param("ppo", "--actor-model-name-or-path qwen3-0.6b --critic-model-name-or-path mistral-7b", "8xL40S",
                     [2, 3], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_weights_are_partitioned_of_models_that_do_not_fit_whole(section, models, gpus, stages):
    """16 bytes a weight of which 14 are divided: 7.2 billion take 13.5 GiB and 12 GiB on each of eight GPUs.

    On one GPU nothing is divided. There stage 2 takes 2 bytes a weight more in an optimizer step: 1.5 billion take 32
    GiB of 31.5, and 29 at stage 0.
    """
    lengths = "--max-prompt-seq-len 64 --max-answer-seq-len 64" if section == "ppo" else "--max-seq-len 512"
    words = f"{models} {lengths} --dtype bf16 --train-batch-size 8"
    choice = fastest(*planner_of(section, words, gpus, StagePlanner))
    config = choice.resolved.config
    trained = [config.actor, config.critic] if section == "ppo" else [config.model]
    assert [model.zero_stage for model in trained] == stages and not choice.lacks


def test_on_one_gpu_mixes_of_stages_2_and_3_are_tried_after_0(models):
    planner, resolved = stage_planner(PPO, given(PPO, models, zero_stage=None), gpu(4 * GIB), {})
    options = stages_to_try(planner, resolved, auto_flags(resolved))
    stages = [(one["actor_zero_stage"], one["critic_zero_stage"]) for one in options]
    assert stages == [(2, 2), (0, 0), (3, 2), (2, 3), (3, 3)]


def test_a_chosen_stage_0_is_said(models):
    # Stage 2 takes 2 bytes a weight more on one GPU.
    planner, resolved = stage_planner(SFT, given(SFT, models, zero_stage=None), gpu(8 * GIB), {})
    plans = [smallest(planner, resolved, auto_flags(resolved), {"zero_stage": stage}).plan for stage in (0, 2)]
    peaks = [plan.reserved()[1] for plan in plans]
    assert peaks[0] < peaks[1]
    choice = fastest(*stage_planner(SFT, given(SFT, models, zero_stage=None), gpu(sum(peaks) / 2), {}))
    assert "--zero-stage 0" in choice.line and not choice.lacks


def test_a_flag_that_needs_a_zero_stage_has_it_where_no_plan_chooses(models, tmp_path):
    """The lowest one; on a CPU, and before GPUs are known. A flag by hand that no stage allows is refused by itself."""
    preset = tmp_path / "preset.yaml"
    preset.write_text("offload_reference_model: true\n")
    for words, stages in {
        "": (0, 0), "--offload true": (1, 1), "--critic-offload-optimizer cpu": (0, 1),
        "--offload-parameters true": (3, 3), "--rollout-weights streamed": (3, 0),
        "--offload true --rollout-weights streamed": (3, 1), f"--preset {preset}": (3, 0),
        f"--preset {preset} --actor-quantization int8 --actor-lora-dim 2": (0, 0),
    }.items():  # fmt: skip
        found = given(PPO, models, *words.split(), ranks=2, zero_stage=None)
        assert (found.config.actor.zero_stage, found.config.critic.zero_stage) == stages, words
        assert not found.is_given("actor_zero_stage") and (len(found.notes) == 1) == ("int8" in words)


def test_the_seconds_are_those_of_one_of_a_rollouts_steps(models):
    """64 responses, two epochs, 32 a step: four steps share a rollout."""
    words = ("--rollout-batch-size", 64, "--ppo-epochs", 2, "--train-batch-size", 32, "--max-answer-seq-len", 64)
    planner, resolved = stage_planner(PPO, given(PPO, models, *words), gpu(4 * GIB), {})
    choice = fastest(planner, resolved)
    whole = sum(planner.seconds(choice.resolved, choice.plan).values())
    assert not choice.lacks and choice.seconds == pytest.approx(whole / 4)
