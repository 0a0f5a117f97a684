"""The user's own DeepSpeed JSON: merge rules, unknown keys, and its values as flags."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.ds_arguments import built
from support.messages import naming, refusal

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.ds_json import flags_from_json, merge_user_json, read_user_json
from pipeline.configuration.ds_keys import check_keys
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse
from pipeline.configuration.groups import DeepSpeedConfig
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin
from pipeline.errors import InputError
from pipeline.preparation.engine_jsons import engine_jsons
from step1_sft.config import SFTConfig
from step1_sft.stage import STAGE
from step3_ppo.config import PPOConfig

SFT = flag_table(SFTConfig)

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
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8},
        "train_batch_size": 64,
    }
    origins = {"max_grad_norm": COMMAND_LINE, "zero_stage": Origin(Kind.PRESET, "p.yaml")}
    assert built(user_json=user, origins=origins) == built() | {"train_batch_size": 64}


def test_values_without_a_given_flag_win():
    user = {"gradient_clipping": 0.5, "zero_optimization": {"sub_group_size": 10, "overlap_comm": False}}
    merged = built(user_json=user, zero_stage=3, origins={"max_grad_norm": DEFAULT, "learning_rate": COMMAND_LINE})
    assert merged["gradient_clipping"] == 0.5
    ours = built(zero_stage=3)["zero_optimization"]
    assert merged["zero_optimization"] == ours | {"sub_group_size": 10, "overlap_comm": False}


def test_contradictions_name_both():
    user = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    files = {"actor_zero_stage": Origin(Kind.PRESET, "p.yaml"), "offload": Origin(Kind.FILE, "c.yaml")}
    origins = {"max_grad_norm": COMMAND_LINE} | files
    assert refusal(merge_user_json, built(), user, flag_table(PPOConfig), origins, source="ds.json") == [
        naming("ds.json ... gradient_clipping ... 0.5 ... --max-grad-norm (command line) ... 1.0"),
        naming("ds.json ... zero_optimization.stage ... 3 ... --actor-zero-stage (p.yaml) ... 2"),
        naming("ds.json", "zero_optimization.offload_optimizer.device", "'cpu'", "--offload (c.yaml)", "'none'"),
    ]


def test_batch_sizes_agree_always():
    (line,) = refusal(built, user_json={"train_micro_batch_size_per_gpu": 5})
    assert line == naming("train_micro_batch_size_per_gpu ... 5 ... --per-device-train-batch-size ... 4")
    (line,) = refusal(built, user_json={"train_batch_size": 65})
    assert "got 65" in line and "4 x --gradient-accumulation-steps 2 x 8 ranks = 64" in line


def test_nothing_given_is_changed():
    ours, user = built(), {"zero_optimization": {"stage": 3}}
    merge_user_json(ours, user, SFT, {}, source="ds.json")
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
    (line,) = refusal(built, user_json=user)
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
        naming("ds.json ... gradient_cliping ... gradient_clipping?"),
        naming("ds.json ... zero_optimization.offload_optimiser ... offload_optimizer?"),
        naming("ds.json ... zero_optimization.offload_param.devise ... device?"),
        naming("ds.json ... flops_profiler.enable ... enabled?"),
        naming("ds.json ... bfloat16.enabeld ... enabled?"),
        naming("ds.json ... fp16 ... True ... a block {...}"),
    ]


# Of a comma on line 2 before a brace on line 3: from Python 3.13 on json names the comma, before that the brace.
TRAILING_COMMA_LINE = 2 if sys.version_info >= (3, 13) else 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{\n "a": 1,\n}', f"line {TRAILING_COMMA_LINE}: not JSON"),
        ("[]", "a list ... an object"),
        ("null", "a single value ... an object"),
        ('{"bf16": {}, "bf16": {}}', "bf16 ... twice"),
        ('{"bf17": {}}', "did you mean bf16?"),
        ('{"bfloat16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16 and fp16 ... one"),
        ('{"optimizer": {"type": "Lion"}}', "torch.optim.AdamW"),
    ],
)
def test_unusable_files(tmp_path, text, message):
    file = tmp_path / "ds.json"
    file.write_text(text)
    (line,) = refusal(read_user_json, file)
    assert line == naming(message) and str(file) in line


def test_other_names_of_a_key_become_the_usual_ones(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"bfloat16": {"enabled": true}, "zero_optimization": {"param_persistence_threshold": 1, "stage": 3}}'
    )
    assert read_user_json(file) == {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage3_param_persistence_threshold": 1, "stage": 3},
    }


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"gradient_clipping": 1}')
    assert read_user_json(tmp_path / "ds.json") == {"gradient_clipping": 1}


def test_missing_file():
    assert refusal(read_user_json, "none.json") == [naming("--deepspeed-config ... none.json ... No such file")]


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_deepspeed.yaml").read_text())


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case["json"][:60])
def test_a_wrong_file_is_refused_in_one_line_that_names_what_is_right(case, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(case["json"])

    def start():
        words = ["--deepspeed-config", str(file), *map(str, case.get("flags", []))]
        resolved = parse(SFTConfig, words, section="sft")
        place = Placement(device="cuda", dtype="bf16", ranks=8, run_dir=tmp_path)
        resolved.config.engine_jsons(resolved.origins, place)

    (line,) = refusal(start)
    assert str(file) in line and [word for word in case["says"] if word not in line] == []


def test_the_corpus_of_wrong_files_is_as_large_as_promised():
    assert len({case["json"] for case in WRONG}) >= 60


def test_a_feature_that_is_switched_off_is_left_out(tmp_path):
    """DeepSpeed ends at keys that it has removed, whatever their value; older files hold many that are off."""
    off = {
        "amp": {"enabled": False, "opt_level": "O1"}, "sparse_gradients": False, "hybrid_engine": {"enabled": False},
        "zero_optimization": {"cpu_offload": False, "zero_quantized_weights": False, "zero_hpz_partition_size": 8},
    }  # fmt: skip
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(off))
    assert read_user_json(file) == {"zero_optimization": {"zero_hpz_partition_size": 8}}


def test_what_the_file_changes_is_told(tmp_path):
    file = tmp_path / "ds.json"
    user = {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 9, "overlap_comm": "auto"},
        "gradient_clipping": 1.0, "bf16": {"enabled": True}, "steps_per_print": 10,
        "activation_checkpointing": {"cpu_checkpointing": True, "profile": False}, "optimizer": {"type": "AdamW"},
        "checkpoint": {"use_node_local_storage": True},
    }  # fmt: skip
    file.write_text(json.dumps(user))
    assert parse(PPOConfig, ["--deepspeed-config", str(file)], section="ppo").notes == (
        naming(f"{file}", "--actor-zero-stage 3 (was 0)", "--critic-zero-stage 3 (was 0), --dtype bf16 (was auto)"),
        naming(f"{file} ... zero_optimization.stage3_prefetch_bucket_size 9, steps_per_print 10"),
        naming(f"{file} ... activation_checkpointing ... no effect ... --gradient-checkpointing"),
        naming(f"{file} ... checkpoint.use_node_local_storage ... no effect"),
    )


# --- as flags -------------------------------------------------------------------------------------------------------


def test_flags_from_json():
    user = {
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
    }
    assert {flag: value for flag, (_, value) in flags_from_json(user, SFT).items()} == {
        "max_grad_norm": 0.5, "zero_stage": 3, "offload": True, "dtype": "fp16"
    }  # fmt: skip
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert flags_from_json(off, SFT) == {"dtype": ("bf16.enabled", "fp32")}


@pytest.mark.parametrize("target", ["1xH100-80GB", "1xV100-32GB"])
@pytest.mark.parametrize("words, dtype", [("", "fp32"), ("--dtype fp16", "fp16"), ("--dtype fp32", "fp32")])
def test_bf16_that_is_switched_off_alone_is_no_bf16_on_a_gpu(tmp_path, words, dtype, target):
    """The model's own type follows --dtype: one that stayed auto would be bf16, under an engine without it."""
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": false}}')
    given = ["--model-name-or-path", "x", "--target", target, "--deepspeed-config", str(file), *words.split()]
    resolved = parse(SFTConfig, given, section="sft")
    assert resolved.config.deepspeed.dtype == dtype
    assert resolved.notes == (() if words else (naming(f"{file} ... --dtype fp32 (was auto)"),))
    (engine,) = engine_jsons(STAGE, resolved, ranks=1).values()
    assert engine["bf16"]["enabled"] is False and engine["fp16"]["enabled"] is (dtype == "fp16")
    with pytest.raises(InputError, match=naming("bf16.enabled ... False ... --dtype (command line) ... True")):
        engine_jsons(STAGE, parse(SFTConfig, [*given, "--dtype", "bf16"], section="sft"), ranks=1)


def test_the_json_that_we_build_says_the_flags_that_it_was_built_from():
    """The key at a flag's field is the one that its value is written to."""
    cases = [
        (2, {"offload": True, "dtype": "fp16"}),
        (3, {"offload_parameters": True, "dtype": "bf16", "stage3_max_live_parameters": 13}),
    ]
    read = set()
    for stage, given in cases:
        json = built(DeepSpeedConfig(**given), zero_stage=stage, dtype=given["dtype"], max_grad_norm=0.3)
        back = {name: value for name, (_, value) in flags_from_json(json, SFT).items()}
        expected = {"zero_stage": stage, "max_grad_norm": 0.3, "per_device_train_batch_size": 4, **given}
        assert back | expected == back
        read |= back.keys()
    # A model's own offload has the keys of the flag for all models.
    assert {name for name, flag in SFT.items() if flag.deepspeed} - read == {"offload_optimizer", "offload_weights"}


def test_the_json_is_a_layer_above_the_defaults(tmp_path):
    file = tmp_path / "ds.json"
    user = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5, "bfloat16": {"enabled": True}}
    file.write_text(json.dumps(user))
    resolved = parse(PPOConfig, ["--deepspeed-config", str(file), "--max-grad-norm", "5e-1"], section="ppo")
    assert resolved.config.actor.zero_stage == resolved.config.critic.zero_stage == 3
    assert resolved.config.deepspeed.dtype == "bf16"
    origins = {name: str(resolved.origins[name]) for name in ("actor_zero_stage", "dtype", "max_grad_norm", "seed")}
    assert origins == {
        "actor_zero_stage": str(file), "dtype": str(file), "max_grad_norm": "command line", "seed": "default"
    }  # fmt: skip


def test_the_json_contradicts_a_given_flag(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}')
    words = ["--deepspeed-config", str(file), "--zero-stage", "2", "--max-grad-norm", "1"]
    assert refusal(parse, SFTConfig, words, section="sft") == [
        naming(f"{file}", "zero_optimization.stage", "3", "--zero-stage is 2 (command line)", '"auto"'),
        naming(f"{file}", "gradient_clipping", "0.5", "--max-grad-norm is 1.0 (command line)", '"auto"'),
    ]


def test_a_value_of_the_json_is_checked_like_a_flag(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3, "sub_group_size": 0}}')
    (line,) = refusal(parse, SFTConfig, ["--deepspeed-config", str(file)], section="sft")
    assert line == naming(f"--sub-group-size ... 0 ({file}) ... greater than")
