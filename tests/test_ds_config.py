"""The DeepSpeed JSON: golden dicts, the user's own JSON, and agreement with the installed DeepSpeed."""

import importlib
import json

import pytest

from pipeline.config import DeepSpeedConfig
from pipeline.ds_config import (
    check_keys,
    flags_from_json,
    frozen_config,
    merge_user_json,
    read_user_json,
    training_config,
)
from pipeline.ds_keys import LOOSE_BLOCKS, MODEL_BLOCKS, TOP_LEVEL
from pipeline.errors import InputError
from pipeline.flags import parse
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def built(settings: DeepSpeedConfig | None = None, **changes):
    """training_config with everyday arguments, some of them changed."""
    arguments = {
        "zero_stage": 2, "dtype": "bf16", "micro_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 8,
        "max_grad_norm": 1.0, "run_dir": "output/runs/sft", "device": "cuda",
    }  # fmt: skip
    return training_config(settings or DeepSpeedConfig(), **(arguments | changes))


def refusal(call, *args, **kwargs) -> list[str]:
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    return str(caught.value).splitlines()


# --- golden dicts ---------------------------------------------------------------------------------------------------

FRAME = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1_000_000_000,
    "wall_clock_breakdown": False,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


def test_stage_0():
    assert built(zero_stage=0) == FRAME | {"zero_optimization": {"stage": 0}}


def test_stage_2():
    zero = {
        "stage": 2, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000, "overlap_comm": True,
        "contiguous_gradients": True,
    }  # fmt: skip
    assert built() == FRAME | {"zero_optimization": zero}


def test_stage_3_with_everything_offloaded():
    settings = DeepSpeedConfig(
        offload=True, offload_parameters=True, stage3_param_persistence_threshold=7, reduce_bucket_size=9,
        communication_data_type="fp32", wall_clock_breakdown=True,
    )  # fmt: skip
    zero = {
        "stage": 3, "reduce_bucket_size": 9, "overlap_comm": True, "contiguous_gradients": True,
        "stage3_param_persistence_threshold": 7, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    expected = FRAME | {"zero_optimization": zero, "communication_data_type": "fp32", "wall_clock_breakdown": True}
    assert built(settings, zero_stage=3) == expected


def test_on_a_cpu_nothing_overlaps_and_nothing_is_pinned():
    zero = built(DeepSpeedConfig(offload=True), device="cpu", dtype="fp32")["zero_optimization"]
    assert zero["overlap_comm"] is False and zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_fp16():
    settings = DeepSpeedConfig(loss_scale=128, initial_scale_power=8, loss_scale_window=50, hysteresis=1)
    assert built(settings, dtype="fp16")["fp16"] == {
        "enabled": True, "loss_scale": 128.0, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1,
        "min_loss_scale": 1.0,
    }  # fmt: skip
    assert built(dtype="fp16")["bf16"] == {"enabled": False}


def test_monitors():
    config = built(DeepSpeedConfig(deepspeed_monitor=["tensorboard", "csv_monitor", "wandb"]))
    place = {"enabled": True, "output_path": "output/runs/sft/deepspeed"}
    assert config["tensorboard"] == place | {"job_name": "tensorboard"}
    assert config["csv_monitor"] == place | {"job_name": "csv_monitor"}
    assert config["wandb"] == {"enabled": True, "group": "output/runs/sft"}


def test_frozen():
    arguments = {"dtype": "bf16", "micro_batch_size": 4, "world_size": 2}
    assert frozen_config(DeepSpeedConfig(), zero_stage=3, offload=True, **arguments) == {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 8,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100_000,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    plain = frozen_config(DeepSpeedConfig(), zero_stage=0, offload=False, **arguments)
    assert plain["zero_optimization"] == {"stage": 0}
    assert "need stage 3" in refusal(frozen_config, DeepSpeedConfig(), zero_stage=0, offload=True, **arguments)[0]
    assert "wanted 0 or 3" in refusal(frozen_config, DeepSpeedConfig(), zero_stage=2, offload=False, **arguments)[0]


def test_refused_combinations():
    settings = DeepSpeedConfig(offload=True, offload_parameters=True)
    assert refusal(built, settings, zero_stage=0, dtype="fp16", device="cpu") == [
        "--offload: needs ZeRO stage 1, 2 or 3, found stage 0; raise --zero_stage or leave --offload out",
        "--offload_parameters: needs ZeRO stage 3, found stage 0",
        "--dtype fp16: DeepSpeed has no fp16 on the CPU; use bf16 or fp32",
    ]
    assert "found stage 2" in refusal(built, DeepSpeedConfig(offload_parameters=True))[0]


# --- the user's JSON ------------------------------------------------------------------------------------------------


def test_auto_is_filled_from_ours_or_left_out():
    user = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "stage3_prefetch_bucket_size": "auto"},
    }
    assert built(user_json=user) == built()


def test_equal_values_are_fine():
    user = {
        "gradient_clipping": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "train_batch_size": 64,
    }
    origins = {"max_grad_norm": "command line", "zero_stage": "p.yaml"}
    assert built(user_json=user, origins=origins) == built() | {"train_batch_size": 64}


def test_values_without_a_given_flag_win():
    user = {"gradient_clipping": 0.5, "zero_optimization": {"sub_group_size": 10, "overlap_comm": False}}
    merged = built(user_json=user, origins={"max_grad_norm": "default", "learning_rate": "command line"})
    assert merged["gradient_clipping"] == 0.5
    assert merged["zero_optimization"] == built()["zero_optimization"] | {"sub_group_size": 10, "overlap_comm": False}


def test_contradictions_name_both():
    user = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    origins = {"max_grad_norm": "command line", "actor_zero_stage": "p.yaml", "offload": "c.yaml"}
    assert refusal(merge_user_json, built(), user, origins, source="ds.json") == [
        "ds.json: gradient_clipping: found 0.5, but --max_grad_norm (command line) makes it 1.0",
        "ds.json: zero_optimization.stage: found 3, but --actor_zero_stage (p.yaml) makes it 2",
        "ds.json: zero_optimization.offload_optimizer.device: found 'cpu', but --offload (c.yaml) makes it 'none'",
    ]


def test_batch_sizes_agree_always():
    (line,) = refusal(built, user_json={"train_micro_batch_size_per_gpu": 5})
    assert line.endswith("train_micro_batch_size_per_gpu: found 5, but --per_device_train_batch_size makes it 4")
    (line,) = refusal(built, user_json={"train_batch_size": 65})
    assert "found 65" in line and "4 x --gradient_accumulation_steps 2 x 8 ranks = 64" in line


def test_nothing_given_is_changed():
    ours, user = built(), {"zero_optimization": {"stage": 3}}
    merge_user_json(ours, user)
    assert ours == built() and user == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("block", [{}, "auto", None, {"type": "auto"}, {"type": "AdamW", "params": {"lr": "auto"}}])
def test_an_optimizer_block_that_says_nothing_is_dropped(block):
    assert built(user_json={"optimizer": block}) == built()


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ({"optimizer": {"type": "Lion"}}, "optimizer.type 'Lion'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "optimizer.params.lr 0.001"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler.type 'WarmupLR'"),
    ],
)
def test_an_optimizer_block_that_says_something_is_refused(user, found):
    (line,) = refusal(merge_user_json, built(), user)
    assert found in line and "torch.optim.AdamW" in line


# --- its keys -------------------------------------------------------------------------------------------------------


def test_unknown_keys_at_every_level():
    user = {
        "gradient_cliping": 1,
        "zero_optimization": {"stage": 2, "offload_optimiser": {}, "offload_param": {"devise": "cpu"}},
        "flops_profiler": {"enable": True},
        "bfloat16": {"enabled": True, "enabeld": 1},
        "fp16": True,
        "optimizer": {"params": {"anything": 1}},
    }
    assert refusal(check_keys, user, "ds.json") == [
        "ds.json: gradient_cliping: DeepSpeed has no such key and would ignore it; did you mean gradient_clipping?",
        "ds.json: zero_optimization.offload_optimiser: DeepSpeed has no such key and would ignore it; "
        "did you mean offload_optimizer?",
        "ds.json: zero_optimization.offload_param.devise: DeepSpeed has no such key and would ignore it; "
        "did you mean device?",
        "ds.json: flops_profiler.enable: DeepSpeed has no such key and would ignore it; did you mean enabled?",
        "ds.json: bfloat16.enabeld: DeepSpeed has no such key and would ignore it; did you mean enabled?",
        "ds.json: fp16: found True, wanted a block {...}",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{\n "a": 1,\n}', "line 3: not JSON"),
        ("[]", "found a list, wanted an object"),
        ('{"bf16": {}, "bf16": {}}', "bf16: stands twice in one block"),
        ('{"bf17": {}}', "did you mean bf16?"),
        ('{"bfloat16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16 and fp16: both are enabled, wanted one"),
        ('{"optimizer": {"type": "Lion"}}', "torch.optim.AdamW"),
    ],
)
def test_unusable_files(tmp_path, text, message):
    file = tmp_path / "ds.json"
    file.write_text(text)
    (line,) = refusal(read_user_json, file)
    assert message in line and str(file) in line


def test_other_names_of_a_key_become_the_usual_ones(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"bfloat16": {"enabled": true}, "zero_optimization": {"param_persistence_threshold": 1, "stage": 3}}'
    )
    assert read_user_json(file) == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage3_param_persistence_threshold": 1, "stage": 3},
    }


def test_missing_file():
    assert refusal(read_user_json, "none.json") == [
        "--deepspeed_config: none.json: cannot read it: No such file or directory"
    ]


# --- as flags -------------------------------------------------------------------------------------------------------


def test_flags_from_json():
    user = {
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}},
        "fp16": {"enabled": True, "loss_scale_window": 10},
        "bf16": {"enabled": False},
    }
    assert {flag: value for flag, (_, value) in flags_from_json(user).items()} == {
        "max_grad_norm": 0.5, "zero_stage": 3, "offload": True, "dtype": "fp16", "loss_scale_window": 10
    }  # fmt: skip
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert flags_from_json(off) == {"dtype": ("bf16.enabled", "fp32")}


def test_the_json_is_a_layer_above_the_defaults(tmp_path):
    file = tmp_path / "ds.json"
    user = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5, "bfloat16": {"enabled": True}}
    file.write_text(json.dumps(user))
    resolved = parse(PPOConfig, ["--deepspeed_config", str(file), "--max_grad_norm", "5e-1"], section="ppo")
    assert resolved.config.actor.zero_stage == resolved.config.critic.zero_stage == 3
    assert resolved.config.deepspeed.dtype == "bf16"
    origins = {name: resolved.origins[name] for name in ("actor_zero_stage", "dtype", "max_grad_norm", "seed")}
    assert origins == {
        "actor_zero_stage": str(file), "dtype": str(file), "max_grad_norm": "command line", "seed": "default"
    }  # fmt: skip


def test_the_json_contradicts_a_given_flag(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}')
    words = ["--deepspeed_config", str(file), "--zero_stage", "2", "--max_grad_norm", "1"]
    assert refusal(parse, SFTConfig, words, section="sft") == [
        f"{file}: gradient_clipping: found 0.5, but --max_grad_norm is 1.0 (command line); "
        'make them equal, or write "auto" into the JSON',
        f"{file}: zero_optimization.stage: found 3, but --zero_stage is 2 (command line); "
        'make them equal, or write "auto" into the JSON',
    ]


def test_a_value_of_the_json_is_checked_like_a_flag(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 4}}')
    (line,) = refusal(parse, SFTConfig, ["--deepspeed_config", str(file)], section="sft")
    assert line.startswith(f"--zero_stage: found 4 ({file}): Input should be less than")


# --- the installed DeepSpeed ----------------------------------------------------------------------------------------

MODELS = {
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "wandb": "monitor.config.WandbConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "comet": "monitor.config.CometConfig",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "compile": "compile.config.CompileConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
}


@pytest.mark.parametrize("block", MODELS)
def test_tables_are_those_of_the_installed_deepspeed(block):
    module, _, name = f"deepspeed.{MODELS[block]}".rpartition(".")
    fields = getattr(importlib.import_module(module), name).model_fields
    assert MODEL_BLOCKS[block] == set(fields) | {field.alias for field in fields.values() if field.alias}


def test_every_model_block_is_compared():
    assert set(MODEL_BLOCKS) == set(MODELS)


class Noting(dict):
    """A dict that remembers which keys it was asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


def test_top_level_keys_are_those_that_deepspeed_asks_for():
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    config = Noting({"train_micro_batch_size_per_gpu": 1})
    Installed(config)
    assert config.asked - TOP_LEVEL == set(), "DeepSpeed asks for keys that we would refuse"
    assert TOP_LEVEL - config.asked == set(), "DeepSpeed no longer asks for these"


CONSTANTS = (
    "profiling.constants",
    "runtime.activation_checkpointing.config",
    "runtime.config",
    "runtime.constants",
    "runtime.model_checkpointing.constants",
    "runtime.swap_tensor.constants",
)


def test_loose_blocks_hold_only_names_that_deepspeed_knows():
    modules = [importlib.import_module(f"deepspeed.{name}") for name in CONSTANTS]
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    assert {name for block in LOOSE_BLOCKS.values() for name in block} - known == {"throughput"}, "a model's field"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_deepspeed_accepts_what_we_build(stage, dtype):
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    settings = DeepSpeedConfig(
        offload=stage > 0, offload_parameters=stage == 3, communication_data_type="fp32",
        deepspeed_monitor=["tensorboard", "csv_monitor", "wandb"],
    )  # fmt: skip
    json_text = json.dumps(built(settings, zero_stage=stage, dtype=dtype, world_size=1))
    parsed = Installed(json.loads(json_text))
    assert parsed.train_batch_size == 8 and parsed.zero_config.stage == stage
    assert parsed.bfloat16_config.enabled == (dtype == "bf16") and parsed.float16_config.enabled == (dtype == "fp16")
    check_keys(json.loads(json_text))


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_accepts_a_frozen_config(stage):
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    config = frozen_config(
        DeepSpeedConfig(), zero_stage=stage, dtype="bf16", micro_batch_size=4, world_size=1, offload=stage == 3
    )
    assert Installed(dict(config)).zero_config.stage == stage
