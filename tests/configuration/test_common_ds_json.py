"""DeepSpeed files that people have already: DeepSpeed-Chat's own dict, and those of transformers' documentation."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flags import parse
from pipeline.configuration.resolved import Resolved
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
AUTO_DTYPES = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}  # fmt: skip
# What transformers' Trainer fills in.
AUTO_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    },
}  # fmt: skip
ON_HOST = {"device": "cpu", "pin_memory": True}
ZERO_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
TRANSFORMERS: dict[str, Any] = AUTO_DTYPES | AUTO_OPTIMIZER | AUTO_BATCH | {
    "steps_per_print": 2000, "wall_clock_breakdown": False
}  # fmt: skip

# What the engine gets of ours in all cases, and of a ZeRO stage's block.
FRAME = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "steps_per_print": 2000, "wall_clock_breakdown": False, "timers": {"throughput": {"enabled": False}},
    "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True}, "fp16": {"enabled": False},
}  # fmt: skip
REDUCED = {"reduce_bucket_size": 200_000_000, "overlap_comm": True, "contiguous_gradients": True}
OURS_AT_2 = {"stage": 2, "allgather_bucket_size": 200_000_000, **REDUCED}
OURS_AT_3 = {
    "stage": 3, **REDUCED, "sub_group_size": 1_000_000_000, "stage3_max_live_parameters": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip


def resolve(folder: Path, user: dict[str, Any], *words: str, config_class: Any = SFTConfig) -> Resolved:
    file = folder / "ds.json"
    file.write_text(json.dumps(user))
    return parse(config_class, ["--deepspeed-config", str(file), *words], section="sft")


def engines(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """The JSON of each engine, on eight GPUs with bf16."""
    place = Placement(device="cuda", dtype="bf16", ranks=8, run_dir=Path("run"))
    jsons: dict[str, dict[str, Any]] = resolved.config.engine_jsons(resolved.origins, place)
    return jsons


def is_taken_by_deepspeed(engine: dict[str, Any]) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    alone = {name: value for name, value in engine.items() if name != "train_batch_size"}
    return Installed(json.loads(json.dumps(alone))).zero_config.stage == engine["zero_optimization"]["stage"]


# --- DeepSpeed-Chat -------------------------------------------------------------------------------------------------


def of_deepspeed_chat(stage: int, offload: bool = False) -> dict[str, Any]:
    """The dict that DeepSpeed-Chat makes for an engine that trains; it has the keys of stage 3 at every stage."""
    device = {"device": "cpu" if offload else "none"}
    zero = {
        "stage": stage, "overlap_comm": True, "offload_param": device, "offload_optimizer": device,
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
    }  # fmt: skip
    rollouts = {
        "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "release_inference_cache": False,
        "pin_parameters": True, "tp_gather_partition_size": 8,
    }  # fmt: skip
    return {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "zero_optimization": zero,
        "bfloat16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False,
        "wall_clock_breakdown": False, "hybrid_engine": rollouts,
        "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "step1_tensorboard"},
    }  # fmt: skip


CHAT_FRAME = FRAME | {
    "train_batch_size": 32, "steps_per_print": 10, "prescale_gradients": False,
    "tensorboard": {"enabled": False, "output_path": "/ds_tensorboard_logs/", "job_name": "step1_tensorboard"},
}  # fmt: skip
OF_STAGE_3 = (
    "zero_optimization.stage3_param_persistence_threshold, zero_optimization.stage3_max_live_parameters, "
    "zero_optimization.stage3_prefetch_bucket_size, zero_optimization.memory_efficient_linear"
)
KEPT = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}


@pytest.mark.parametrize(
    ("stage", "unread", "zero"),
    [
        (0, f"zero_optimization.overlap_comm, {OF_STAGE_3}", {"stage": 0, **KEPT}),
        (2, OF_STAGE_3, OURS_AT_2 | KEPT),
    ],
)
def test_deepspeed_chats_dict_is_taken_and_one_line_names_its_keys_of_stage_3(tmp_path, stage, unread, zero):
    resolved = resolve(tmp_path, of_deepspeed_chat(stage))
    file = tmp_path / "ds.json"
    assert [note for note in resolved.notes if "no effect" in note] == [
        naming(f"{file} ... {unread} ... stage {stage}")
    ]
    (engine,) = engines(resolved).values()
    assert engine == CHAT_FRAME | {"zero_optimization": zero}
    assert is_taken_by_deepspeed(engine)


def test_deepspeed_chats_dict_of_stage_3(tmp_path):
    resolved = resolve(tmp_path, of_deepspeed_chat(3, offload=True))
    file = tmp_path / "ds.json"
    assert resolved.notes == (
        naming(
            f"{file}",
            "--zero-stage 3 (was 0), --per-device-train-batch-size 4 (was 16)",
            "--offload True (was False), --offload-parameters True (was False)",
            "--stage3-max-live-parameters 30000000 (was 1000000000), --dtype bf16 (was auto)",
        ),
        naming(
            f"{file}",
            "train_batch_size 32, steps_per_print 10",
            "zero_optimization.stage3_param_persistence_threshold 10000.0",
            "zero_optimization.stage3_prefetch_bucket_size 30000000.0",
            "zero_optimization.memory_efficient_linear False, prescale_gradients False",
        ),
    )
    (engine,) = engines(resolved).values()
    own = {
        "stage3_param_persistence_threshold": 10_000, "stage3_max_live_parameters": 30_000_000,
        "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
    }  # fmt: skip
    assert engine == CHAT_FRAME | {
        "zero_optimization": OURS_AT_3 | own | {"offload_optimizer": ON_HOST, "offload_param": ON_HOST}
    }
    assert is_taken_by_deepspeed(engine)


# --- transformers' docs and the trainers built on it ----------------------------------------------------------------

OLD_BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
}
FAR = {"stage3_max_reuse_distance": 1_000_000_000}
ON_DISK = {"device": "nvme", "nvme_path": "/disk", "pin_memory": True}
COMMON = {
    "transformers ZeRO-2 with the optimizer on the host": (
        TRANSFORMERS | {"zero_optimization": {
            "stage": 2, "offload_optimizer": ON_HOST, "overlap_comm": True, "contiguous_gradients": True, **OLD_BUCKETS
        }},
        OURS_AT_2 | OLD_BUCKETS | {"offload_optimizer": ON_HOST},
    ),
    "transformers ZeRO-3 with all on the host": (
        TRANSFORMERS | {"zero_optimization": ZERO_3 | {"offload_optimizer": ON_HOST, "offload_param": ON_HOST}},
        OURS_AT_3 | FAR | {"offload_optimizer": ON_HOST, "offload_param": ON_HOST},
    ),
    "ZeRO-3 with little in memory": (
        TRANSFORMERS | {"zero_optimization": ZERO_3 | {
            "overlap_comm": False, "stage3_max_live_parameters": 1e8, "stage3_param_persistence_threshold": 1e5,
            "stage3_prefetch_bucket_size": 5e7, "reduce_bucket_size": 1e7,
        }},
        OURS_AT_3 | {
            "overlap_comm": False, "stage3_max_live_parameters": 100_000_000, "stage3_prefetch_bucket_size": 5e7,
            "reduce_bucket_size": 10_000_000, "stage3_param_persistence_threshold": 100_000, **FAR
        },
    ),
    "ZeRO-2 with a key of stage 3": (
        AUTO_DTYPES | AUTO_BATCH | {"steps_per_print": 2000, "zero_optimization": {
            "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e8,
            "reduce_bucket_size": "auto",
        }},
        OURS_AT_2,
    ),
    "stage 0 with the keys of stage 2": (
        AUTO_DTYPES | AUTO_BATCH | {"steps_per_print": 2000, "zero_optimization": {
            "stage": 0, "overlap_comm": False, "contiguous_gradients": True, "round_robin_gradients": True,
            **OLD_BUCKETS,
        }},
        {"stage": 0, "allgather_partitions": True},
    ),
    "stage 3 with a key of stage 2, and remarks": (
        TRANSFORMERS | {
            "_comment": "of a colleague", "//": "see the wiki", "$schema": "x", "comment": "bf16",
            "zero_optimization": ZERO_3 | {"_comment": 1, "_comment_2": 2, "allgather_bucket_size": 2e8},
        },
        OURS_AT_3 | FAR,
    ),
    "ZeRO-Infinity": (
        TRANSFORMERS | {"zero_optimization": ZERO_3 | {"offload_optimizer": ON_DISK, "offload_param": ON_HOST}},
        OURS_AT_3 | FAR | {"offload_optimizer": ON_DISK, "offload_param": ON_HOST},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMON)
def test_a_common_file_is_taken_and_the_engine_gets_its_values(tmp_path, name):
    user, zero = COMMON[name]
    (engine,) = engines(resolve(tmp_path, user, "--per-device-train-batch-size", "4")).values()
    assert engine == FRAME | {"zero_optimization": zero, "fp16": AUTO_DTYPES["fp16"] | {"enabled": False}}
    of_flags = [engine["zero_optimization"].get(name) for name in ("sub_group_size", "stage3_max_live_parameters")]
    assert [value for value in of_flags if isinstance(value, float)] == []
    assert is_taken_by_deepspeed(engine)


def test_settings_of_fp16_do_not_speak_against_bf16(tmp_path):
    user = AUTO_DTYPES | {"fp16": {"enabled": "auto", "loss_scale_window": 500, "hysteresis": 4}}
    (engine,) = engines(resolve(tmp_path, user, "--dtype", "bf16")).values()
    assert engine["bf16"] == {"enabled": True} and engine["fp16"]["enabled"] is False


@pytest.mark.parametrize(("dtype", "has_effect"), [("bf16", False), ("fp16", True)])
def test_a_scale_of_fp16_is_told_as_what_it_does(tmp_path, dtype, has_effect):
    user = {"fp16": {"loss_scale": 0, "loss_scale_window": 500}}
    told = {
        True: "gives to DeepSpeed fp16.loss_scale_window 500",
        False: "fp16.loss_scale_window: has no effect: it needs --dtype fp16, got bf16",
    }
    assert resolve(tmp_path, user, "--dtype", dtype).notes == (
        naming(f"{tmp_path / 'ds.json'} ... {told[has_effect]}"),
    )


def test_keys_of_another_zero_stage_and_a_schedule_are_told_in_a_line_each(tmp_path):
    user, _ = COMMON["stage 3 with a key of stage 2, and remarks"]
    told = [note.split(": ", 1)[1] for note in resolve(tmp_path, user).notes]
    assert told == [
        "sets --zero-stage 3 (was 0)",
        naming("steps_per_print 2000, zero_optimization.contiguous_gradients True"),
        naming("scheduler ... no effect ... --lr-scheduler-type constant_with_warmup"),
        naming("zero_optimization.stage3_gather_16bit_weights_on_model_save ... no effect"),
        naming("zero_optimization.allgather_bucket_size ... no effect ... stage 3"),
    ]


def test_a_key_of_one_models_zero_stage_has_its_effect_there_alone(tmp_path):
    user = {"zero_optimization": {"stage3_max_live_parameters": 3e7, "reduce_bucket_size": 1000}}
    words = ("--actor-zero-stage", "3", "--critic-zero-stage", "2")
    resolved = resolve(tmp_path, user, *words, config_class=PPOConfig)
    assert resolved.notes == (
        naming(
            f"{tmp_path / 'ds.json'}",
            "--stage3-max-live-parameters 30000000 (was 1000000000)",
        ),
        naming(f"{tmp_path / 'ds.json'}", "zero_optimization.reduce_bucket_size 1000"),
    )
    blocks = {name: engine["zero_optimization"] for name, engine in engines(resolved).items()}
    assert blocks["actor"]["stage3_max_live_parameters"] == 30_000_000
    assert "stage3_max_live_parameters" not in blocks["critic"]
    assert blocks["actor"]["reduce_bucket_size"] == blocks["critic"]["reduce_bucket_size"] == 1000
    words = ("--actor-zero-stage", "1", "--critic-zero-stage", "2")
    (note,) = resolve(tmp_path, {"zero_optimization": {"sub_group_size": 9}}, *words, config_class=PPOConfig).notes
    assert note == naming("zero_optimization.sub_group_size ... no effect ... stage 1 and 2")


@pytest.mark.parametrize(
    ("words", "where"),
    [((), "0; on GPUs the plan may choose another"), (("--zero-stage", "0"), "0"), (("--zero-stage", "2"), "")],
)
def test_a_key_without_effect_at_the_default_stage_may_have_one_at_the_stage_that_a_plan_chooses(
    tmp_path, words, where
):
    notes = resolve(tmp_path, {"zero_optimization": {"overlap_comm": True}}, *words).notes
    told = f"{tmp_path / 'ds.json'}: zero_optimization.overlap_comm: no effect at ZeRO stage {where}"
    assert [note for note in notes if "no effect" in note] == ([told] if where else [])


# --- what else a file gives -----------------------------------------------------------------------------------------


def test_pinning_and_monitors_are_told(tmp_path):
    user = {
        "wandb": {"enabled": True, "project": "p"}, "tensorboard": {"enabled": True, "output_path": "tb"},
        "csv_monitor": {"enabled": False, "output_path": "csv"},
        "zero_optimization": {"stage": 3.0, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }  # fmt: skip
    resolved = resolve(tmp_path, user)
    file = tmp_path / "ds.json"
    assert resolved.notes == (
        naming(
            f"{file}",
            "--zero-stage 3 (was 0), --offload True (was False)",
        ),
        naming(
            f"{file} ... wandb.enabled True, wandb.project 'p', tensorboard.enabled True, tensorboard.output_path 'tb'",
            "zero_optimization.offload_optimizer.pin_memory False",
        ),
    )
    (engine,) = engines(resolved).values()
    assert engine["wandb"] == {"enabled": True, "group": "run", "project": "p"}
    assert engine["tensorboard"] == {"enabled": True, "output_path": "tb", "job_name": "tensorboard"}
