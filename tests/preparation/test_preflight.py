"""What would end a later stage is found before the first one starts, in the dry run too: models, rows, room."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from support.families import save_family
from support.launch_stub import ROOT
from support.messages import naming, refusal
from support.saved_state import write_state
from support.tiny_run import make_folder, make_tokenizer, save_base, write_lines
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pipeline import hub
from pipeline.configuration.flags import parse
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.configuration.stage import Stage
from pipeline.engine import start_models
from pipeline.errors import EnvironmentFault, InputError
from pipeline.models import paths
from pipeline.models.weight_files import warn_once
from pipeline.preparation import preflight
from pipeline.preparation.dry_run import dry_run_stage, look_and_plan
from pipeline.preparation.preflight import look_before_start
from rlhf.stages import STAGES, stage_of
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

SFT, REWARD, PPO, _ = STAGES
CLASSES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of a tiny run, and files that single stages cannot use."""
    folder = make_folder(tmp_path_factory.mktemp("preflight"), num_train=8, num_test=4, num_documents=2)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    write_lines(folder / "chats.jsonl", [{"messages": turns}])
    write_lines(folder / "other.jsonl", [{"ask": "Who?", "reply": "Me."}])
    save_base(folder / "stranger", make_tokenizer(["Other words, and so other pairs of letters."]))
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    families = {
        "capped": "gemma-2", "experts": "qwen3-moe", "untested": "stablelm", "long": "phi-4-mini", "headless": "olmoe",
        "cacheless": "mamba",
    }  # fmt: skip
    for name, family in families.items():
        tokenizer.save_pretrained(folder / name)
        save_family(family, folder / name)
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder / "base", folder / "bare", ignore=ignored)
    write_lines(folder / "odd.jsonl", [{"messages": [{"role": "alien", "content": "x"}]}])
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, inputs: Path) -> None:
    """In the folder of the inputs, without a network."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(preflight, "is_reachable", lambda: False)


SPLIT = "--data-split 2,4,4"  # as `train.py` hands it to its stages


def settings(**changed: str) -> dict[Stage, Resolved]:
    """The three stages of a plan, chained as `train.py` does it; `changed`: further words of a stage."""
    words = {
        "sft": "--model-name-or-path base --data-path train.jsonl --output-dir out/sft --max-seq-len 96",
        "reward": "--model-name-or-path base --data-path train.jsonl --output-dir out/reward --max-seq-len 96",
        "ppo": "--actor-model-name-or-path out/sft --critic-model-name-or-path out/reward --data-path train.jsonl "
        "--output-dir out --max-prompt-seq-len 64 --max-answer-seq-len 32",
    }
    return {
        stage_of(stage): parse(CLASSES[stage], f"{line} {SPLIT} {changed.get(stage, '')}".split(), section=stage)
        for stage, line in words.items()
    }


def configs(**changed: str) -> dict[Stage, Any]:
    """The configurations of `settings`."""
    return {stage: resolved.config for stage, resolved in settings(**changed).items()}


def problems(error: type[Exception] = InputError, *, dry_run: bool = True, **changed: str) -> list[str]:
    return refusal(look_before_start, configs(**changed), error=error, dry_run=dry_run, named_by_section=True)


def test_a_plan_that_can_run_has_no_problem_and_nothing_is_written(inputs):
    before = sorted(inputs.rglob("*"))
    assert look_before_start(configs(), dry_run=True, named_by_section=True) == []
    assert sorted(inputs.rglob("*")) == before


CASES = {
    "data of the last stage": ({"ppo": "--data-path ./gone.jsonl"}, "--ppo.data-path: data path './gone.jsonl'"),
    "evaluation data": ({"sft": "--eval-data-path ./gone.jsonl"}, "--sft.eval-data-path: data path './gone.jsonl'"),
    "text of the ptx loss": ({"ppo": "--unsupervised-data-path ./x.txt"}, "--ppo.unsupervised-data-path: data path"),
    "columns": ({"reward": "--data-path other.jsonl"}, "--reward.data-path: other.jsonl:1: "),
    "a map without a column": ({"reward": "--column-map prompt"}, "--reward.column-map prompt: "),
    "a map to no column": ({"ppo": "--column-map promt=prompt"}, "--ppo.column-map promt=prompt"),
    "rows without a pair": (
        {"reward": "--data-path chats.jsonl"},
        "--reward.data-path ... chats.jsonl ... 1 dropped ... chosen and rejected ... "
        "(first: chats.jsonl:1, got 'messages')",
    ),
    "turns": ({"sft": "--data-path odd.jsonl"}, "--sft.data-path: odd.jsonl: no usable row: "),
    "a model": ({"reward": "--model-name-or-path ./bas"}, "--reward.model-name-or-path: ./bas: no such folder"),
    "no model": ({"sft": "--model-name-or-path="}, "--sft.model-name-or-path: no model is named"),
    "a reward model as start": ({"sft": "--model-name-or-path scorer"}, "--sft.model-name-or-path: scorer is a reward"),
    "the reward model": ({"ppo": "--reward-model-name-or-path ./x"}, "--ppo.reward-model-name-or-path: ./x: no such"),
    "positions": ({"sft": "--max-seq-len 1000"}, "--sft.max-seq-len 1000 ... base has 128 positions"),
    "positions of the last": ({"ppo": "--max-prompt-seq-len 100"}, "--ppo.max-prompt-seq-len + --ppo.max-answer-seq-"),
    "layers": ({"reward": "--lora-dim 8 --lora-module-name foo"}, "--reward.lora-module-name foo: matches no linear"),
    "an actor's layers": (
        {"ppo": "--actor-lora-dim 8 --actor-lora-module-name foo"}, "--ppo.actor-lora-module-name foo: matches"
    ),
    "a critic's tokenizer": (
        {"reward": "--model-name-or-path stranger"}, "--ppo.critic-model-name-or-path stranger ... tokenizer"
    ),
    "a critic without a head": (
        {"ppo": "--critic-model-name-or-path base"},
        "--ppo.critic-model-name-or-path ... base ... reward head (OPTForCausalLM) ... stage 2",
    ),
    "soft caps": (
        {"sft": "--model-name-or-path capped --attn-implementation sdpa"}, "--sft.attn-implementation sdpa: capped caps"
    ),
    "positions that change with the length": (
        {"sft": "--model-name-or-path long", "ppo": "--max-answer-seq-len 33"},
        "--ppo.max-prompt-seq-len + --ppo.max-answer-seq-len 97 ... long ... (longrope) ... 96 tokens",
    ),
    "experts in stage 3": (
        {"sft": "--model-name-or-path experts", "ppo": "--actor-zero-stage 3"},
        "--ppo.actor-model-name-or-path ... experts ... 4 experts ... ZeRO stage 3",
    ),
    "an actor without keys and values": (
        {"sft": "--model-name-or-path cacheless"},
        "--ppo.actor-model-name-or-path cacheless ... mamba has no cache ... only stage 1",
    ),
    "a checkpoint": ({"ppo": "--resume ./gone"}, "--ppo.resume ./gone ... no such folder ... auto, never"),
    "no template": ({"sft": "--template tokenizer"}, "--sft.template: "),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_would_end_a_later_stage_is_found_before_the_first(name):
    changed, line = CASES[name]
    (found,) = problems(**changed)
    assert found == naming(line)


def test_an_untested_type_is_called_so_only_where_nothing_is_refused(caplog):
    assert problems(sft="--model-name-or-path untested --max-seq-len 1000") and not caplog.messages
    look_before_start(configs(sft="--model-name-or-path untested"), dry_run=True, named_by_section=True)
    assert caplog.messages == [naming("untested ... model type stablelm ... untested")]


RATES = {  # flags of a stage -> what is said of them
    "sft --learning-rate 1.1e-3": "base: --learning-rate 0.0011 is above 0.001",
    "sft --learning-rate 1e-3 --lora-learning-rate 1": "",
    "sft --learning-rate 1 --lora-dim 2 --lora-learning-rate 1e-2": "",
    "reward --learning-rate 1 --lora-dim 2 --lora-learning-rate 2e-2": "base: --lora-learning-rate 0.02 is above 0.01",
    "sft --learning-rate 2e-3 --lora-dim 2 --only-optimize-lora false": "base: --learning-rate 0.002 is above 0.001",
    "reward --learning-rate 2e-3 --lora-dim 2 --only-optimize-lora false": "base: --learning-rate 0.002 is above 0.001",
    "ppo --critic-learning-rate 1 --critic-lora-dim 2": "",
    "ppo --critic-learning-rate 1 --critic-lora-dim 2 --only-optimize-lora false": (
        "base: --critic-learning-rate 1 is above 0.001"
    ),
    "ppo --critic-learning-rate 1": "base: --critic-learning-rate 1 is above 0.001",
}


@pytest.mark.parametrize("words", RATES)
def test_a_learning_rate_out_of_range_is_warned_of_but_not_of_a_small_model(caplog, monkeypatch, words):
    stage, _, flags = words.partition(" ")
    assert start_models.LARGE == 10_000_000
    size = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained("base").parameters())
    for large, said in ((size, [RATES[words]] if RATES[words] else []), (size + 1, [])):
        monkeypatch.setattr(start_models, "LARGE", large)
        warn_once.cache_clear()
        caplog.clear()
        look_before_start(configs(**{stage: flags}), dry_run=True)
        assert [line.partition(": training")[0] for line in caplog.messages] == said


def test_what_is_not_trained_in_a_mixture_of_experts_is_said(caplog):
    warn_once.cache_clear()  # a case above starts from the same folder
    look_before_start(configs(sft="--model-name-or-path experts"), dry_run=True)
    assert caplog.messages == [naming("experts ... mixture of experts ... auxiliary loss ... LoRA")]


def test_a_family_without_a_class_for_scores_is_an_actor_and_no_reward_model():
    actor = "--model-name-or-path headless"
    assert look_before_start(configs(sft=actor), dry_run=True) == []
    line = naming("--reward.model-name-or-path ... headless ... sequence classification ... olmoe ... another")
    assert problems(sft=actor, reward=actor) == [line]


def test_a_stage_alone_may_take_earlier_ones_as_made():
    alone = {PPO: configs()[PPO]}
    assert look_before_start(alone, dry_run=True) != [], "they might be models of the hub"
    assert look_before_start(alone, dry_run=True, base_of_output={"out/sft": "base", "out/reward": "base"}) == []
    with pytest.raises(InputError) as refused:
        look_before_start(
            alone, dry_run=True, named_by_section=True, base_of_output={"out/sft": "bare", "out/reward": "base"}
        )
    missing = naming("--ppo.actor-model-name-or-path ... bare ... no model.safetensors")
    assert str(refused.value) == missing
    note = naming("no network ... org/model")
    assert look_before_start(
        alone, dry_run=True, base_of_output=dict.fromkeys(("out/sft", "out/reward"), "org/model")
    ) == [note]


def test_all_problems_of_all_stages_are_told_together():
    lines = problems(sft="--data-path ./a.jsonl", reward="--model-name-or-path ./b", ppo="--data-path ./c.jsonl")
    assert [line.split(":")[0] for line in lines] == [
        "--sft.data-path", "--reward.model-name-or-path", "--ppo.data-path"
    ]  # fmt: skip


def test_columns_are_looked_at_although_the_model_cannot_be_used():
    lines = problems(sft="--model-name-or-path ./gone --data-path other.jsonl")
    assert [line.split(":")[0] for line in lines] == ["--sft.model-name-or-path", "--sft.data-path"]


def test_the_dry_run_says_what_it_could_not_reach_and_that_is_no_error():
    """In one line, however many flags name the same."""
    stages = configs(
        sft="--model-name-or-path org/model --data-path org/rows:0.5 train.jsonl",
        reward="--model-name-or-path org/model --data-path org/rows org/more",
    )
    assert look_before_start(stages, dry_run=True) == [naming("no network ... org/model, org/rows, org/more")]


def test_a_start_without_network_ends_where_its_hub_ids_are_not_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    (line,) = problems(EnvironmentFault, dry_run=False, sft="--model-name-or-path org/no-such-model")
    assert line.startswith("--sft.model-name-or-path: org/no-such-model: cannot be fetched")


def test_a_plan_that_cannot_be_made_is_an_error_in_one_line_for_all_stages(monkeypatch, capsys, inputs):
    """Step 3 is planned from the model that its actor is made from in the same call."""
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(paths, "is_reachable", lambda: False)

    def faults(**changed: str) -> str:
        with pytest.raises(EnvironmentFault) as fault:
            look_and_plan(settings(**changed), slots=[1])
        return str(fault.value)

    line = "not planned: org/model ... a network ... `hf download org/model` ... a local folder"
    assert faults(sft="--model-name-or-path org/model") == naming(f"sft, ppo: {line}")
    assert "plan of reward, on 1 x CPU" in capsys.readouterr().out
    whole = dict.fromkeys(("sft", "reward"), "--model-name-or-path org/model")
    assert faults(**whole) == naming(f"sft, reward, ppo: {line}")
    broken = inputs / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("pipeline.preparation.dry_run.look_before_start", lambda *args, **more: [])
    stages = {SFT: settings(sft="--model-name-or-path broken")[SFT]}
    with pytest.raises(InputError, match="^sft: not planned: broken: "):
        look_and_plan(stages, slots=[1])


def test_a_dry_run_downloads_no_rows_and_samples_those_of_the_cache(monkeypatch):
    """The double of `datasets` holds one set in its cache, and fails where it is not in offline mode."""
    settings = datasets.config, huggingface_hub.constants
    for module in (preflight, hub):
        monkeypatch.setattr(module, "is_reachable", lambda: True)
    for module in settings:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)

    def load_dataset(name):
        assert all(module.HF_HUB_OFFLINE for module in settings)
        if name != "org/cached":
            raise ConnectionError("offline mode is enabled")
        return {"train": datasets.Dataset.from_list([{"prompt": "a?", "chosen": "good", "rejected": "bad"}] * 3)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plan = configs(reward="--data-path org/rows org/cached")
    assert look_before_start(plan, dry_run=True) == [naming("downloads no rows): org/rows")]
    samples = [sample.line for sample in preflight.sample_sources(REWARD, plan[REWARD], "base")]
    assert samples[0] == "" and samples[1].startswith("org/cached: 3 rows of ")
    assert not any(module.HF_HUB_OFFLINE for module in settings), "left as it was"


@pytest.mark.parametrize(
    "sampled, counted, said", [(9, 9, "all 8"), (3, 9, "the first 3 of 8"), (3, 2, "the first 3 of over 5")]
)
def test_a_sample_names_the_records_of_its_source(monkeypatch, sampled, counted, said):
    monkeypatch.setattr(preflight, "SAMPLED_RECORDS", sampled)
    monkeypatch.setattr(preflight, "COUNTED_RECORDS", counted)
    (sample,) = preflight.sample_sources(SFT, configs()[SFT], "base")
    assert f" from {said} records" in sample.line and (sample.rows is None) == ("over" in said)


@pytest.mark.parametrize("averaged", [False, True])
def test_free_room_is_compared_with_the_models_and_checkpoints_of_all_stages(monkeypatch, averaged):
    """In fp32, on this CPU, a model has 4 bytes a weight, a checkpoint 12; an average adds a model, and 4 bytes."""
    classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
    policy, values = (sum(w.numel() for w in of.from_pretrained("base", num_labels=1).parameters()) for of in classes)
    needed = 2 * (4 + 12) * (policy + values) + (averaged and (4 + 4) * policy)
    flags = {"ppo": "--enable-ema"} if averaged else {}
    for share, fits in ((1.0001, True), (0.9999, False)):
        monkeypatch.setattr(preflight, "free_bytes", lambda folder, share=share: share * needed)
        if fits:
            assert look_before_start(configs(**flags), dry_run=True) == []
    (line,) = problems(EnvironmentFault, **flags)
    assert ": the outputs need " in line and " GiB are free; " in line
    few = {stage: f"--keep-checkpoints 0 {flags.get(stage, '')}" for stage in CLASSES}
    assert look_before_start(configs(**few), dry_run=True) == []
    adapters = {stage: f"--lora-dim 2 {flags.get(stage, '')}" for stage in ("sft", "reward")}
    lora = {"ppo": f"--actor-lora-dim 2 --critic-lora-dim 2 {flags.get('ppo', '')}"}
    assert look_before_start(configs(**adapters, **lora), dry_run=True) == [], "a checkpoint holds what is trained"


def test_a_dry_run_prints_its_plan_where_the_disk_is_too_small(monkeypatch, capsys):
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 1)
    words = f"--model-name-or-path base --data-path train.jsonl --output-dir out/sft --max-seq-len 96 {SPLIT}"
    with pytest.raises(EnvironmentFault, match=naming("out/runs/sft ... need ... free")):
        dry_run_stage(SFT, parse(SFTConfig, words.split(), section="sft"), slots=[1])
    plan = capsys.readouterr().out
    assert plan.startswith("plan of sft, on 1 x CPU") and "CUDA" not in plan


def test_a_dry_run_finds_what_the_checkpoint_would_refuse(tmp_path):
    words = f"--model-name-or-path base --data-path train.jsonl --max-seq-len 96 --run-dir {tmp_path} {SPLIT}"
    resolved = parse(SFTConfig, words.split(), section="sft")
    settings = values_by_rule(resolved.config, "same") | {"seed": 7}
    write_state(tmp_path / "checkpoints/step-3", {"settings": settings, "sizes": {}})
    with pytest.raises(InputError, match=naming("--seed ... 1234 ... checkpoint ... 7")):
        dry_run_stage(SFT, resolved, slots=None)


HELD_OUT = {
    "no fraction": ("--eval-fraction 0", False),
    "a fraction": ("--eval-fraction 0.5", True),
    "evaluation rows": ("--eval-fraction 0 --eval-data-path test.jsonl", True),
    "test rows of a source": ("--eval-fraction 0 --data-path train.jsonl marked.jsonl", True),
}


@pytest.mark.parametrize("name", HELD_OUT)
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_best_model_is_not_kept_where_flags_hold_no_row_out(inputs, stage, name):
    flags, is_right = HELD_OUT[name]
    row = {"prompt": "Who?", "chosen": "Me.", "rejected": "Us."}
    write_lines(inputs / "marked.jsonl", [row | {"split": "train"}, row | {"split": "test"}])
    plan = {stage: f"--keep-best {flags}"}
    ways = f"--{stage}.eval-fraction above 0 or --{stage}.eval-data-path"
    expected = [naming(f"--{stage}.keep-best ... no row is held out ... {ways}")]
    assert (look_before_start(configs(**plan), dry_run=True) == []) if is_right else (problems(**plan) == expected)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(("--dry-run",), marks=pytest.mark.slow)], ids=["start", "dry run"])
def test_train_names_the_problems_of_all_steps_before_any_starts(inputs, tmp_path, more):
    """In the process of its own, without the demo's model and data."""
    words = ("--actor-model", inputs / "base", "--reward-model", "tiny", "--sft.data-path", inputs / "train.jsonl")
    lengths = ("--sft.max-seq-len", "96", "--ppo.max-prompt-seq-len", "64", "--ppo.max-answer-seq-len", "32")
    command = [sys.executable, ROOT / "train.py", *words, *lengths, "--ppo.data-path", "./gone.jsonl", *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    *lines, note = done.stderr.splitlines()
    assert done.returncode == 2 and [line.split(":")[1].strip() for line in lines] == [
        "--reward.model-name-or-path", "--reward.data-path", "--ppo.data-path"
    ]  # fmt: skip
    assert note == naming("tiny ... `make demo`")
    assert ("== stage 1" in done.stdout) == bool(more) and not list(tmp_path.iterdir())


def test_a_package_that_a_later_stage_needs_is_missed_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = problems(EnvironmentFault, ppo="--actor-quantization nf4 --actor-lora-dim 2")
    assert line.startswith("--ppo.actor-quantization nf4: pip install bitsandbytes")
