"""What a preset says of memory gives way to what was given by hand; what was given by hand is refused by its flag."""

from pathlib import Path

import pytest
from support.messages import naming

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.errors import InputError, dashed
from pipeline.preparation.engine_jsons import engine_jsons
from step1_sft.stage import STAGE as SFT
from step3_ppo.stage import STAGE as PPO

MODELS = "--actor-model-name-or-path a --critic-model-name-or-path c"


def given(stage: Stage, preset: str, words: str, folder: Path, *, flag: str = "--preset") -> Resolved:
    """Settings of a file and of a command line."""
    file = folder / "given.yaml"
    file.write_text(preset.replace("; ", "\n"), encoding="utf-8")
    words = f"{flag} {file} {words} {MODELS if stage is PPO else '--model-name-or-path m'}"
    return parse(stage.config, words.split(), section=stage.section)


@pytest.mark.parametrize(
    ("stage", "preset", "words", "ranks", "changed"),
    [
        (SFT, "offload_parameters: true", "--quantization nf4 --lora-dim 2", 4, {"offload_parameters": False}),
        (SFT, "offload_parameters: true", "--zero-stage 1", 4, {"offload_parameters": False}),
        (SFT, "offload: true", "--zero-stage 0", 2, {"offload": False}),
        (SFT, "offload: true", "--optimizer-states 8bit", 2, {"offload": False}),
        (SFT, "offload: true; offload_parameters: true", "--zero-stage 0", 2,
         {"offload": False, "offload_parameters": False}),
        (PPO, "offload_reference_model: true", "--actor-quantization int8 --actor-lora-dim 2", 2,
         {"offload_reference_model": False}),
        (PPO, "inference_tp_size: 2", "--rollout-weights streamed", 2, {"inference_tp_size": 1}),
        (PPO, "inference_tp_size: 2", "--generation-engine static", 2, {"inference_tp_size": 1}),
    ],
)  # fmt: skip
def test_a_preset_gives_way_to_flags_given_by_hand_and_says_so(tmp_path, stage, preset, words, ranks, changed):
    before = given(stage, preset, words, tmp_path)
    found = with_ranks(before, ranks)
    was, now = (dict(flat_items(one.config)) for one in (before, found))
    other = {name: value for name, value in now.items() if value != was[name] and found.is_given(name)}
    assert other == changed
    engine_jsons(stage, before, ranks=ranks)
    assert len(found.notes) == len(changed)
    for (name, value), note in zip(changed.items(), found.notes, strict=True):
        parts = f"{dashed(name)} {value} ... {was[name]} ({tmp_path}/given.yaml)"
        assert note == naming(parts, "since --")


def test_the_note_of_a_preset_that_gives_way_has_the_reason(tmp_path):
    found = with_ranks(given(SFT, "offload_parameters: true", "--zero-stage 2", tmp_path), 1)
    parts = f"--offload-parameters False ... True ({tmp_path}/given.yaml) ... --offload-parameters"
    assert found.notes == (naming(parts, "stage 3 ... stage 2"),)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--zero-stage 3 --quantization int8 --lora-dim 2",
         "--quantization int8 ... ZeRO stage 3 ... --zero-stage 2"),
        ("--zero-stage 2 --offload-parameters",
         "--offload-parameters ... stage 2 ... --zero-stage 3"),
    ],
)  # fmt: skip
def test_what_was_given_by_hand_is_refused_by_the_flag_to_change(tmp_path, words, line):
    """Also where there is a preset, or a file of --config says it."""
    found = with_ranks(given(SFT, "max_seq_len: 64", words, tmp_path), 2)
    with pytest.raises(InputError) as refused:
        engine_jsons(SFT, found, ranks=2)
    assert (str(refused.value), found.notes) == (naming(line), ())
    stage, *rest = words.removeprefix("--").split(" --")
    in_file = given(SFT, stage.replace(" ", ": "), " ".join(f"--{one}" for one in rest), tmp_path, flag="--config")
    with pytest.raises(InputError) as refused:
        engine_jsons(SFT, in_file, ranks=2)
    assert str(refused.value) == naming(line)


def test_a_preset_that_contradicts_nothing_stays(tmp_path):
    found = with_ranks(given(SFT, "offload: true", "--lora-dim 2", tmp_path), 2)
    assert found.config.model.zero_stage == 1 and found.config.deepspeed.offload and found.notes == ()


def test_each_model_has_the_lowest_stage_that_its_flags_allow(tmp_path):
    """Quantised weights are not partitioned, and offloaded ones are: no stage suits both."""
    words = "--actor-quantization int8 --actor-lora-dim 2 --critic-offload-weights cpu"
    values = with_ranks(given(PPO, "max_answer_seq_len: 64", words, tmp_path), 2).values
    assert (values["actor_zero_stage"], values["critic_zero_stage"]) == (0, 3)
