"""The DeepSpeed JSON that we build: golden dicts, refusals, and agreement with the installed DeepSpeed."""

import json
from pathlib import Path

import pytest
from support.ds_arguments import built
from support.messages import naming, refusal

from pipeline.configuration.ds_config import Placement, frozen_json
from pipeline.configuration.ds_keys import REFUSED, check_keys
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig
from pipeline.configuration.origins import Kind, Origin
from pipeline.errors import InputError
from pipeline.models.source import ModelSource
from step3_ppo.config import PPOConfig

# --- golden dicts ---------------------------------------------------------------------------------------------------

FRAME = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 1_000_000_000,
    "wall_clock_breakdown": False,
    "timers": {"throughput": {"enabled": False}},
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


ZERO_3 = {"zero_optimization": {"stage": 3}}


def test_stage_0():
    assert built(zero_stage=0) == FRAME | {"zero_optimization": {"stage": 0}}


def test_stage_2():
    zero = {
        "stage": 2, "reduce_bucket_size": 200_000_000, "allgather_bucket_size": 200_000_000, "overlap_comm": True,
        "contiguous_gradients": True,
    }  # fmt: skip
    assert built() == FRAME | {"zero_optimization": zero}


def test_stage_3_with_everything_offloaded():
    settings = DeepSpeedConfig(offload=True, offload_parameters=True, stage3_max_live_parameters=5, sub_group_size=3)
    zero = {
        "stage": 3, "reduce_bucket_size": 200_000_000, "overlap_comm": True, "contiguous_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": True, "stage3_max_live_parameters": 5, "sub_group_size": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert built(settings, zero_stage=3) == FRAME | {"zero_optimization": zero}


def test_on_a_cpu_nothing_overlaps_and_nothing_is_pinned():
    zero = built(DeepSpeedConfig(offload=True), device="cpu", dtype="fp32")["zero_optimization"]
    assert zero["overlap_comm"] is False and zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_one_rank_does_without_what_serves_several():
    alone = built(world_size=1)["zero_optimization"]
    assert alone == built(zero_stage=1)["zero_optimization"] | {"overlap_comm": False, "contiguous_gradients": False}
    assert built(zero_stage=1, world_size=1)["zero_optimization"] == alone
    for stage in (0, 3):
        several, one = (built(zero_stage=stage, world_size=size)["zero_optimization"] for size in (8, 1))
        assert one == several
    assert built(DeepSpeedConfig(offload=True), world_size=1)["zero_optimization"]["stage"] == 2
    typed = built(world_size=1, user_json={"data_types": {"grad_accum_dtype": "fp32"}})
    assert typed["zero_optimization"]["stage"] == 2
    said = {"zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}}}
    zero = built(world_size=1, user_json=said, origins={"zero_stage": Origin(Kind.DEEPSPEED_JSON, "ds.json")})[
        "zero_optimization"
    ]
    assert zero == alone | {"offload_optimizer": {"device": "none"}}
    assert built(user_json=said)["zero_optimization"]["stage"] == 2


def test_ranks_of_one_machine_reduce_at_the_end_at_stage_1():
    plain = built(zero_stage=1)["zero_optimization"]
    together = built(zero_stage=1, one_node=True)["zero_optimization"]
    assert plain["overlap_comm"] and plain["contiguous_gradients"]
    assert together == plain | {"overlap_comm": False, "contiguous_gradients": False}
    for stage in (0, 2, 3):
        assert built(zero_stage=stage, one_node=True) == built(zero_stage=stage)
    # What was asked for stays.
    for name in ("overlap_comm", "contiguous_gradients"):
        said = {"zero_optimization": {name: True}}
        assert built(zero_stage=1, one_node=True, user_json=said)["zero_optimization"] == plain
    offloaded = built(DeepSpeedConfig(offload=True), zero_stage=1, one_node=True)["zero_optimization"]
    assert offloaded["overlap_comm"]


def test_fp16():
    assert built(dtype="fp16")["fp16"] == {"enabled": True} and built(dtype="fp16")["bf16"] == {"enabled": False}


def test_frozen():
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=Path("unused"))
    assert frozen_json(DeepSpeedConfig(), ModelConfig(zero_stage=3), place, offload=True) == {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 2,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    for stage in (0, 1, 2):
        plain = frozen_json(DeepSpeedConfig(), ModelConfig(zero_stage=stage), place, offload=False)
        assert plain["zero_optimization"] == {"stage": 0}
    (line,) = refusal(frozen_json, DeepSpeedConfig(), ModelConfig(zero_stage=2), place, offload=True)
    assert "need ZeRO stage 3" in line


def test_refused_combinations():
    settings = DeepSpeedConfig(offload=True, offload_parameters=True)
    assert refusal(built, settings, zero_stage=0, dtype="fp16", device="cpu") == [
        naming("--offload ... 1, 2 or 3 ... stage 0 ... --zero-stage ... --offload"),
        naming("--offload-parameters ... stage 0 ... --zero-stage 3"),
        naming("--dtype fp16 ... CPU ... bf16 or fp32"),
    ]
    assert "got stage 2" in refusal(built, DeepSpeedConfig(offload_parameters=True))[0]


def offloaded(json: dict) -> set[str]:
    """The blocks that put something of an engine into host memory."""
    return {name for name in ("offload_optimizer", "offload_param") if name in json["zero_optimization"]}


def test_a_models_own_flags_say_what_of_it_is_in_host_memory():
    both = DeepSpeedConfig(offload=True, offload_parameters=True)
    assert offloaded(built(offload_optimizer="cpu")) == {"offload_optimizer"}
    assert offloaded(built(zero_stage=3, offload_weights="cpu")) == {"offload_param"}
    assert offloaded(built(both, zero_stage=3, offload_optimizer="none")) == {"offload_param"}
    assert offloaded(built(both, zero_stage=3, offload_weights="none")) == {"offload_optimizer"}
    assert offloaded(built(both, zero_stage=0, offload_optimizer="none", offload_weights="none")) == set()
    words = "--actor-zero-stage 3 --critic-zero-stage 3 --actor-offload-optimizer cpu --critic-offload-weights cpu"
    resolved = parse(PPOConfig, words.split(), section="ppo")
    place = Placement(device="cuda", dtype="bf16", ranks=1, run_dir=Path("output/runs/ppo"))
    jsons = resolved.config.engine_jsons(resolved.origins, place)
    assert {name: offloaded(json) for name, json in jsons.items()} == {
        "actor": {"offload_optimizer"}, "critic": {"offload_param"}, "reference": set(), "reward model": set()
    }  # fmt: skip


def test_each_model_of_stage_3_has_a_folder_on_the_disk_of_weights_but_where_its_own_flag_says_otherwise(tmp_path):
    disk = {"device": "nvme", "nvme_path": "/disk", "buffer_count": 9}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": disk}, "aio": {"queue_depth": 4}}))
    words = ["--deepspeed-config", str(file), "--offload-reference-model", "--critic-offload-weights", "cpu"]
    resolved = parse(PPOConfig, words, section="ppo")
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=Path("output/runs/ppo"))
    jsons = resolved.config.engine_jsons(resolved.origins, place)
    found = {name: one["zero_optimization"].get("offload_param") for name, one in jsons.items()}
    assert found == {
        "actor": disk | {"nvme_path": "/disk/actor"},
        "critic": {"device": "cpu", "pin_memory": True},
        "reference": disk | {"nvme_path": "/disk/reference"},
        "reward model": None,
    }
    for name in ("actor", "reference"):
        assert jsons[name]["zero_optimization"]["stage3_prefetch_bucket_size"] == 0
        assert jsons[name]["aio"] == {"queue_depth": 4}


def test_a_models_own_flags_are_named_where_they_are_refused():
    assert refusal(built, zero_stage=0, offload_optimizer="cpu", offload_weights="cpu") == [
        naming("--offload-optimizer cpu", "1, 2 or 3", "stage 0", "--zero-stage", "--offload-optimizer cpu"),
        naming("--offload-weights cpu ... stage 0 ... --zero-stage 3"),
    ]
    user = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    given = {"offload_optimizer": Origin(Kind.FILE, "config.yaml")}
    (line,) = refusal(built, offload_optimizer="none", user_json=user, origins=given)
    assert line == naming(
        "zero_optimization.offload_optimizer.device", "'cpu'", "--offload-optimizer (config.yaml)", "'none'"
    )


def test_moments_in_8_bits_stay_on_the_device_below_zero_stage_3():
    untested = {"zero_allow_untested_optimizer": True}
    assert built(optimizer_states="8bit") == built() | untested
    message = "--optimizer-states 8bit ... 0, 1 or 2"
    assert refusal(built, zero_stage=3, optimizer_states="8bit") == [naming(message, "stage 3 ... fp32")]
    on_host = [naming(message, "cpu ... fp32")]
    assert refusal(built, DeepSpeedConfig(offload=True), optimizer_states="8bit") == on_host


def test_quantised_weights_are_neither_partitioned_nor_trained():
    for kind in ("int8", "nf4"):
        assert refusal(built, zero_stage=3, quantization=kind) == [
            naming(f"--quantization {kind} ... ZeRO stage 3 ... --zero-stage 2"),
            naming(f"--quantization {kind} ... --lora-dim 16 ... 0"),
        ]
    (line,) = refusal(built, DeepSpeedConfig(only_optimize_lora=False), quantization="int8", lora_dim=4)
    assert "leave --only-optimize-lora false out" in line
    (line,) = refusal(built, DeepSpeedConfig(only_optimize_lora=False, save_adapter_only=True), lora_dim=4)
    assert line == naming("--save-adapter-only ... --only-optimize-lora false")
    assert built(quantization="int8", lora_dim=4, zero_stage=2)["zero_optimization"]["stage"] == 2


def test_a_refused_quantisation_is_called_by_its_models_flag():
    place = Placement(device="cpu", dtype="fp32", ranks=1, run_dir=Path("run"))
    config = PPOConfig(critic=ModelConfig(quantization="int8"))
    (line,) = refusal(config.engine_jsons, dict.fromkeys(flag_table(PPOConfig), "default"), place)
    assert line.startswith("--critic-quantization int8: ") and "--critic-lora-dim 16" in line


# --- the installed DeepSpeed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_alias", [False, True])
def test_every_key_of_deepspeed_is_taken_with_the_default_that_it_has(by_alias):
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    offload = {"offload_param": {}, "offload_optimizer": {}}
    parsed = Installed({"train_micro_batch_size_per_gpu": 1, "comms_logger": {}, "zero_optimization": offload})
    models = {
        "zero_optimization": parsed.zero_config, "fp16": parsed.float16_config, "bf16": parsed.bfloat16_config,
        "bfloat16": parsed.bfloat16_config, "comms_logger": parsed.comms_config.comms_logger,
        **{name: getattr(parsed.monitor_config, name) for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
    }  # fmt: skip
    check_keys({name: model.model_dump(mode="json", by_alias=by_alias) for name, model in models.items()})
    check_keys(
        {
            "zero_optimization": {"leaf_module": {"classes": "a.Block"}},
            "timers": {"throughput": parsed.timers_config.model_dump()},
            "flops_profiler": vars(parsed.flops_profiler_config),
            "activation_checkpointing": ACT_CHKPT_DEFAULT,
            "aio": parsed.aio_config,
            "checkpoint": {"tag_validation": "Warn", "writer": {"type": "FAST", "io_buffer_size": 2**20}},
            "data_types": {"param_dtype": None, "keep_in_fp32_modules": ["norm"]},
        }
    )


def test_what_deepspeed_has_removed_is_refused_by_name():
    from deepspeed.runtime import config as installed

    removed = set(installed._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{name}" for name in installed._REMOVED_ZERO_CONFIG_KEYS}
    assert removed == {key for key, reason in REFUSED.items() if reason.startswith("DeepSpeed has removed it")}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_deepspeed_accepts_what_we_build(stage, dtype):
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    settings = DeepSpeedConfig(offload=stage > 0, offload_parameters=stage == 3)
    json_text = json.dumps(built(settings, zero_stage=stage, dtype=dtype, world_size=1))
    parsed = Installed(json.loads(json_text))
    assert parsed.train_batch_size == 8 and parsed.zero_config.stage == stage
    assert parsed.bfloat16_config.enabled == (dtype == "bf16") and parsed.float16_config.enabled == (dtype == "fp16")
    check_keys(json.loads(json_text))


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_accepts_a_frozen_config(stage):
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    place = Placement(device="cuda", dtype="bf16", ranks=1, run_dir=Path("unused"))
    config = frozen_json(DeepSpeedConfig(), ModelConfig(zero_stage=stage), place, offload=stage == 3)
    assert Installed(dict(config)).zero_config.stage == stage


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"zero_optimization": {"offload_param": {"buffer_count": -1}}}, "offload_param.buffer_count: got -1: Input"),
        (
            {"zero_optimization": {"stage": 0}, "bf16": {"bf16_master_weights_and_grads": True}},
            "only supported with ZeRO",
        ),
        ({"checkpoint": {"tag_validation": "often"}}, "OFTEN"),
    ],
)
def test_a_value_that_only_deepspeed_checks_is_refused_in_one_line_before_a_model_is_loaded(block, words):
    from pipeline.engine.start import partitioned_loading

    with (
        pytest.raises(InputError, match="^DeepSpeed refuses ") as caught,
        partitioned_loading(FRAME | ZERO_3 | block, ModelSource("")),
    ):
        pytest.fail("a model would be loaded")
    assert words in str(caught.value) and "\n" not in str(caught.value)
