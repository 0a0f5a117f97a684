"""Shapes of known models without a hub, and benchmarks/reports/presets.md, which is made of them."""

import json
import re

import pytest
from support.marks import rare_but
from support.messages import naming
from support.source_tree import ROOT

from benchmarks.speed.planned import planner_of
from pipeline.configuration.flags import load_yaml
from pipeline.configuration.groups import ModelConfig
from pipeline.planning.disk import outputs
from pipeline.planning.measurement import model_size, shapes
from pipeline.planning.needs import ModelUse
from rlhf.known_models import SIZES, model_families
from rlhf.preflight import main
from website import presets

# Numbers of parameters: of OPT counted from its published weights, of the others as their pages on the hub say.
PUBLISHED = {
    "facebook/opt-125m": 125_239_296, "facebook/opt-350m": 331_196_416, "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800, "facebook/opt-6.7b": 6_658_473_984, "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288, "facebook/opt-66b": 65_719_701_504, "bigscience/bloom-1b1": 1_065_314_304,
    "ai-forever/mGPT": 1_417_596_928, "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976, "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384, "google-t5/t5-3b": 2_851_598_336,
}  # fmt: skip
PRESETS = ROOT / "launch" / "presets"
PAGE = (ROOT / "benchmarks" / "reports" / "presets.md").read_text(encoding="utf-8")
SLOW = rare_but(["350m", "1.3b", "llama-2-7b"], [name for name in presets.HARDWARE if name != "japanese"])


@pytest.mark.slow
def test_known_shapes_have_the_published_numbers_of_parameters():
    sizes = {path: model_size(ModelUse("actor", path, ModelConfig()), "bf16").weights for path in shapes()}
    assert sizes == PUBLISHED


def test_the_start_models_of_all_presets_have_shapes():
    files = [load_yaml(str(file)) for file in PRESETS.iterdir() if file.stem != "tiny"]
    presets = [section for sections in files for section in sections.values()]
    named = {preset["model_name_or_path"] for preset in presets if "model_name_or_path" in preset}
    assert named | {hub_id for family in model_families() for hub_id, *_ in family.values()} == set(shapes())


def plan_of_qwen(folder, monkeypatch, capsys, *words):
    """The plan of stage 1 where no hub is reached."""
    monkeypatch.setattr("pipeline.preparation.preflight.is_reachable", lambda: False)
    monkeypatch.chdir(folder)
    model = ["--model", "Qwen/Qwen2.5-0.5B-Instruct", "--target", "1xH100", "--max-seq-len", "64", "--explain"]
    task = {"stages": {"sft": [*model, *words]}, "dry_run": True, "slots": None, "base_of_output": {}}
    assert main(json.dumps(task)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_known_model_is_planned_without_a_hub(tmp_path, monkeypatch, capsys):
    page = plan_of_qwen(tmp_path, monkeypatch, capsys)
    assert re.search(r"^  weights +494\.0\n  trained +494\.0\n", page, re.MULTILINE)


@pytest.mark.parametrize(
    "words, line",
    [
        ((), "0.92 GiB of models ... 1 x 5.52 GiB of checkpoints"),
        (("--save-steps", "10", "--save-dtype", "fp32"), "1.84 GiB of models ... 3 x 5.52 GiB of checkpoints"),
        (("--keep-checkpoints", "0"), "0.92 GiB of models ... no checkpoint"),
    ],
)
def test_a_plan_counts_the_disk_of_a_model_whose_weights_are_not_here(tmp_path, monkeypatch, capsys, words, line):
    """494,032,768 weights: 2 or 4 bytes each in a model, in a checkpoint three numbers in fp32."""
    assert plan_of_qwen(tmp_path, monkeypatch, capsys, *words) == naming(f"disk ... {line}")


def test_the_disk_of_stage_3_has_the_moving_average_in_models_and_checkpoints():
    """Beside 12 bytes of masters and moments a checkpoint has 4 of the average, whose model has a folder of its own."""
    words = "--actor-model-name-or-path 125m --critic-model-name-or-path 125m --dtype bf16"
    plain, average = (planner_of("ppo", f"{words} --enable-ema {way}", "1xH100") for way in ("false", "true"))
    without, counted = (
        outputs(planner.needs(resolved).models, planner.dtype(resolved), resolved.config.run, saves_adapters=False)
        for planner, resolved in (plain, average)
    )
    weights = without.models[0] // 2
    assert weights == 125_239_296 and without.models == [2 * weights, 2 * (weights + 768)]  # the critic's score head
    assert counted.models == [*without.models, 2 * weights]
    assert without.checkpoint == 12 * sum(without.models) / 2 and counted.checkpoint == without.checkpoint + 4 * weights


def test_one_of_a_thing_is_not_said_in_the_plural():
    words = "--actor-model-name-or-path 125m --critic-model-name-or-path 125m --per-device-generation-batch-size 1"
    for batches, said in (
        (1, "1 prompt x 1 sample = 1 response a rollout; 1 prompt at once on a rank"),
        (2, "2 prompts x 1 sample = 2 responses a rollout; 1 prompt at once on a rank"),
    ):
        more = f"--generation-batches {batches} --per-device-train-batch-size 1"
        planner, resolved = planner_of("ppo", f"{words} {more}", "1xH100")
        assert planner.needs(resolved).batch[0].startswith(said)


def numbers_and_words(row: str) -> tuple[list[float], str]:
    """The figures of a row after its name, and all that is not one."""
    cells = row.partition("GB |")[2]
    return [float(figure) for figure in re.findall(r"[\d.]+", cells)], re.sub(r"[\d.]+", "", cells)


@pytest.mark.parametrize("name", ["japanese", *SLOW])
def test_the_page_of_plans_says_what_is_planned(name, tmp_path, monkeypatch):
    """Versions of transformers differ in a few tensors of a pass, and figures below 0.2 by a step of their rounding."""
    monkeypatch.chdir(tmp_path)  # where no earlier run says what a run that goes on would have
    row = presets.row(name)
    written = next(line for line in PAGE.splitlines() if line.startswith(row.partition("GB |")[0]))
    (figures, words), (expected, also) = numbers_and_words(row), numbers_and_words(written)
    assert figures == pytest.approx(expected, rel=0.06, abs=0.011) and words == also


def test_the_page_of_plans_has_every_name():
    assert list(presets.HARDWARE) == re.findall(r"^\| `(.+?)`", PAGE, re.MULTILINE)
    names = {*SIZES, *(name for family in model_families() for name in family), *presets.SFT_ALONE}
    assert set(presets.HARDWARE) == names - {"tiny"}
    assert PAGE.startswith(presets.INTRODUCTION)
