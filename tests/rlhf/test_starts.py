"""What a stage of `rlhf train` starts from where no earlier one is, and whose preset it takes; lines that say both."""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
from support.in_process import look_in_process
from support.launch_stub import TINY, make_model, started, train
from support.messages import naming
from support.tiny_run import make_folder

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.origins import DEFAULT, Kind, Origin
from pipeline.errors import InputError
from rlhf.known_models import preset_of_size
from rlhf.starts import start_lines
from rlhf.train import main
from rlhf.train_plan import Plan, make_plan

RULE = ("--ppo.reward-function", "length")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(*words: str) -> Plan:
    return make_plan(list(words), prog="train.py")


def values(plan: Plan, number: int = 3) -> dict[str, object]:
    return dict(flat_items(plan.stages[number].resolved.config))


def preset(plan: Plan, number: int = 3) -> str:
    return Path(plan.stages[number].resolved.preset).name


def weights(folder: Path, shapes: Mapping[str, list[int]]) -> str:
    """A folder with a file of int8 weights of these shapes, which takes no disk."""
    folder.mkdir(parents=True)
    header, first = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "I8", "shape": shape, "data_offsets": [first, first := first + prod(shape)]}
    words = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + first)
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_a_first_run_of_groups_names_the_trial_of_its_task():
    """Not where it goes on, where a reward model scores, where no group is compared, or after stage 1."""
    Path("r.py").write_text("def f(completions): return [1.0] * len(completions)")
    own = ["--step", "3", "--actor-model", "small", "--data-path", "q.jsonl:0.5"]
    own += ["--ppo.reward-function", "r.py:f", "length:0.1"]

    def command(*words: str) -> list[str]:
        return [line for line in start_lines(planned(*own, *words)) if "rlhf reward" in line]

    expected = "whether this model can learn this task: rlhf reward r.py:f length:0.1 --data q.jsonl --model small"
    sizes = "--num-samples-per-prompt 8 --max-prompt-seq-len 256 --max-answer-seq-len 512"
    assert command("--method", "grpo") == [f"{expected} {sizes} --output output"]
    given = ["--ppo.column-map", "prompt=q", "--ppo.num-samples-per-prompt", "4", "--ppo.max-answer-seq-len", "64"]
    given += ["--ppo.max-prompt-seq-len", "32"]
    sizes = "--column-map prompt=q --num-samples-per-prompt 4 --max-prompt-seq-len 32 --max-answer-seq-len 64"
    assert command("--method", "rloo", *given, "--ppo.output-dir", "out") == [f"{expected} {sizes} --output out"]
    Path("t.py").write_text(
        'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: It.\n    """\n    return a\n'
    )
    tools = "--tools t.py:add t.py:add2 --num-samples-per-prompt 8 --max-prompt-seq-len 256 --max-answer-seq-len 512"
    Path("t.py").write_text(Path("t.py").read_text() + Path("t.py").read_text().replace("add(", "add2("))
    found = command("--method", "grpo", "--ppo.tools", "t.py:add", "t.py:add2", "--ppo.max-turns", "3")
    assert found == [f"{expected} {tools} --max-turns 3 --output output"]
    assert command("--method", "ppo", "--ppo.num-samples-per-prompt", "4") == []
    assert command("--method", "grpo", "--ppo.reward-model-name-or-path", "tiny") == []
    assert command("--method", "grpo", "--step", "1", "3") == []
    environment = Path("output/runs/ppo/env.json")
    environment.parent.mkdir(parents=True)
    environment.write_text("{}")
    assert command("--method", "grpo") == []


def test_settings_of_functions_are_not_printed():
    Path("r.py").write_text("def f(completions, key=''): return [1.0] * len(completions)")
    Path("t.yaml").write_text("ppo: {reward_function: [{name: 'r.py:f', args: {api_key: hunter2}}]}")
    own = ["--step", "3", "--method", "grpo", "--actor-model", "small", "--data-path", "q.jsonl", "--config", "t.yaml"]
    assert "hunter2" not in "".join(start_lines(planned(*own)))


def test_settings_of_functions_are_not_printed_in_a_stages_command(capsys):
    Path("r.py").write_text("def f(completions, key=''): return [1.0] * len(completions)")
    entry = '{"name": "r.py:f", "args": {"api_key": "hunter2"}}'
    call = ["--step", "3", "--method", "grpo", "--actor-model", "qwen2.5-0.5b", "--data-path", "q.jsonl", "--dry-run"]
    main([*call, "--ppo.reward-function", entry])
    printed = "".join(capsys.readouterr())
    assert "bash" in printed and "api_key" in printed and "hunter2" not in printed


# --- the start of stage 3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (RULE, ("actor_model_name_or_path", "critic_model_name_or_path")),
        (("--method", "grpo", *RULE), ("actor_model_name_or_path",)),
        (("--method", "dpo"), ("model_name_or_path",)),
        (("--method", "kto"), ("model_name_or_path",)),
    ],
    ids=["ppo", "grpo", "dpo", "kto"],
)
def test_stage_3_starts_from_the_named_model_where_no_stage_1_is(words, flags):
    model = "Qwen/Qwen2.5-0.5B"
    plan = planned("--step", "3", "--actor-model", "qwen2.5-0.5b", *words)
    section = plan.chosen[0].stage.section
    assert [values(plan)[flag] for flag in flags] == [model] * len(flags)
    assert naming(f"{section} ... {model} ... no output/sft") in list(start_lines(plan))
    make_model(Path("output/sft"))
    plan = planned("--step", "3", "--actor-model", "qwen2.5-0.5b", *words)
    assert [values(plan)[flag] for flag in flags] == ["output/sft"] * len(flags)
    assert naming(f"{section} ... output/sft ... stage 1") in list(start_lines(plan))
    assert preset(plan) == "small.yaml"


def test_a_size_names_the_start_of_its_preset_and_a_critic_waits_for_its_reward_model():
    actor = values(planned("--step", "3", "--actor-model", "125m"))
    assert actor["actor_model_name_or_path"] == "facebook/opt-125m"
    assert actor["critic_model_name_or_path"] == "output/reward"


@pytest.mark.parametrize("words", [("--step", "1", "3"), ("--step", "3", "--output-dir", "begun"), ("--step", "3")])
def test_stage_3_waits_for_a_stage_1_that_runs_or_has_begun_or_where_no_model_is_named(words, tmp_path):
    (tmp_path / "begun/runs/sft/checkpoints").mkdir(parents=True)
    named = () if words == ("--step", "3") else ("--actor-model", "tiny")
    out = "begun" if "begun" in words else "output"
    assert values(planned(*words, *named, *RULE))["actor_model_name_or_path"] == f"{out}/sft"


@pytest.mark.slow
def test_the_command_runs_from_the_named_model_and_says_so(tmp_path):
    words = ("--step", "3", "--method", "grpo", *RULE)
    done = train(tmp_path, *TINY, *words, STUB_OUTCOMES="0,0")
    assert done.returncode == 0, done.stderr
    assert naming("ppo ... output/demo/base ... no output/sft") in done.stdout.splitlines()
    (ranks,) = started(tmp_path)
    assert ranks[ranks.index("--actor-model-name-or-path") + 1] == "output/demo/base"
    unnamed = train(tmp_path / "other", *words)
    assert unnamed.returncode == 2 and "output/sft: got no config.json" in unnamed.stderr


# --- presets --------------------------------------------------------------------------------------------------------


def test_a_model_that_a_stages_flag_names_brings_its_own_preset():
    for path, name in (("Qwen/Qwen3-0.6B", "small.yaml"), ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1b.yaml")):
        plan = planned("--step", "3", "--ppo.actor-model-name-or-path", path)
        assert preset(plan) == name and values(plan)["actor_model_name_or_path"] == path
        assert re.search(rf"^ppo: preset \S*{name}$", "\n".join(start_lines(plan)), re.M)
    plan = planned("--step", "3", "--method", "dpo", "--dpo.model-name-or-path", "Qwen/Qwen3-0.6B")
    assert preset(plan) == "small.yaml" and values(plan)["chat_template_kwargs"] == ["enable_thinking=false"]
    unknown = planned("--step", "3", "--ppo.actor-model-name-or-path", "org/model")
    assert preset(unknown) == "" and "ppo: no preset; flags that" in "\n".join(start_lines(unknown))


def test_later_stages_follow_the_model_that_the_flag_of_stage_1_names(tmp_path):
    (tmp_path / "run.yaml").write_text("sft: {model_name_or_path: Qwen/Qwen2.5-7B}\n")
    for words in (("--sft.model-name-or-path", "Qwen/Qwen2.5-7B"), ("--config", "run.yaml")):
        plan = planned(*words)
        assert [preset(plan, n) for n in (1, 2, 3)] == ["8b.yaml", "small.yaml", "8b.yaml"]
        assert values(plan, 1)["model_name_or_path"] == "Qwen/Qwen2.5-7B"
    typed = planned("--actor-model", "125m", "--sft.model-name-or-path", "Qwen/Qwen2.5-7B")
    assert preset(typed, 1) == "125m.yaml", "--actor-model says whose preset"
    assert preset(planned("--reward.model-name-or-path", "Qwen/Qwen3-8B"), 2) == "8b.yaml"


def test_a_name_that_is_no_path_is_refused_by_the_flag():
    with pytest.raises(InputError, match=r"^--ppo.actor-model-name-or-path: got 'qwen3-9b'.*did you mean qwen3-8b"):
        planned("--step", "3", "--ppo.actor-model-name-or-path", "qwen3-9b")


def test_a_folder_has_the_preset_of_its_number_of_weights(tmp_path):
    sizes = {
        "tiny": 10**6,
        "small": 135 * 10**6,
        "1b": 1_500 * 10**6,
        "3b": 3 * 10**9,
        "8b": 8 * 10**9,
        "13b": 13 * 10**9,
    }
    found = {name: preset_of_size(weights(tmp_path / name, {"a": [size]})) for name, size in sizes.items()}
    assert found == {name: "" if name in ("tiny", "13b") else name for name in sizes}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    (tmp_path / "broken/model.safetensors").write_text("x")
    assert preset_of_size(str(tmp_path / "broken")) == preset_of_size(str(tmp_path / "none")) == ""
    folder = weights(tmp_path / "split", {"a": [1000, 100_000], "b": [50 * 10**6]})
    for words in (("--ppo.actor-model-name-or-path", folder), ("--actor-model", folder)):
        assert preset(planned("--step", "3", *words)) == "small.yaml"


def cached(cache: Path, name: str, shapes: Mapping[str, list[int]]) -> Path:
    """A snapshot of a hub id in a cache, with weights of these shapes."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    return Path(weights(repository / "snapshots/abc", shapes))


def test_a_hub_id_has_the_preset_of_its_size_where_it_is_in_the_cache(tmp_path, monkeypatch):
    """No network is used. Of a download that was interrupted nobody knows the size, and a run keeps what it has."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.socket.connect", None)  # would be a TypeError
    ways = [("--step", "3", flag, "org/model") for flag in ("--ppo.actor-model-name-or-path", "--actor-model")]
    assert [preset(planned(*words)) for words in ways] == ["", ""]
    snapshot = cached(tmp_path / "hub", "org/model", {"a": [1_500 * 10**6]})
    assert [preset(planned(*words)) for words in ways] == ["1b.yaml", "1b.yaml"]
    assert preset_of_size("org/model@main") == "1b" and preset_of_size("org/model@v1") == preset_of_size("a b/c") == ""
    (snapshot / "model.safetensors").rename(snapshot / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert preset_of_size("org/model") == ""
    (snapshot / "part-1.safetensors").rename(snapshot / "model.safetensors")
    run = tmp_path / "output/runs/ppo"
    run.mkdir(parents=True)
    (run / "done.json").write_text(json.dumps({"settings": {"seed": 1}}))
    for began, expected in ((DEFAULT, ""), (Origin(Kind.PRESET, "launch/presets/small.yaml"), "small.yaml")):
        (run / "config.json").write_text(json.dumps({"max_answer_seq_len": {"value": 256, **began.entry}}))
        assert [preset(planned(*words)) for words in ways] == [expected, expected]
    (snapshot / "config.json").unlink()
    assert [preset(planned(*words)) for words in ways] == ["small.yaml", "small.yaml"], "the cache was emptied"


@pytest.mark.parametrize(
    ("began", "expected"),
    [
        (Origin(Kind.PRESET, "launch/presets/1.3b.yaml"), "1.3b.yaml"),
        (DEFAULT, ""),
    ],
)
def test_a_run_that_began_with_another_preset_goes_on_with_it(tmp_path, began, expected):
    """As runs of versions did that gave any folder OPT-1.3B's preset by this flag, and none by --actor-model."""
    words = ("--step", "3", "--ppo.actor-model-name-or-path", weights(tmp_path / "model", {"a": [135 * 10**6]}))
    run = tmp_path / "output/runs/ppo"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"max_answer_seq_len": {"value": 256, **began.entry}}))
    assert preset(planned(*words)) == "small.yaml", "nothing is there to go on from"
    (run / "done.json").write_text(json.dumps({"settings": {"seed": 1}}))
    assert preset(planned(*words)) == expected
    assert preset(planned(*words, "--overwrite")) == "small.yaml"


# --- warm-up --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_notes_a_warm_up_as_long_as_the_run_of_every_stage(tmp_path, monkeypatch, capsys):
    make_folder(tmp_path)
    look_in_process(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = "--actor-model base --data-path train.jsonl --sft.max-seq-len 64 --reward.max-seq-len 64"
    words += " --ppo.max-prompt-seq-len 64 --ppo.max-answer-seq-len 16 --max-steps 5 --dry-run --num-warmup-steps"
    for warmup, noted in (("5", ["sft", "reward", "ppo"]), ("4", [])):
        assert main([*words.split(), warmup]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert re.findall(r"note: (\w+): --num-warmup-steps 5: the run has 5 steps", said) == noted
