"""Names of base models: the presets they bring on every deployment, and the reward model that goes with an actor."""

import pytest
from support.launch_stub import ROOT
from support.messages import naming

from pipeline.configuration.flags import load_yaml, parse
from pipeline.errors import InputError
from pipeline.launching.request import parse_request
from pipeline.preparation.engine_jsons import engine_jsons
from rlhf.known_models import SIZES, KnownModel, known_model
from rlhf.stages import STAGES
from rlhf.train_plan import command_of, make_plan

PRESETS = ROOT / "launch" / "presets"
KNOWN = load_yaml(str(ROOT / "launch" / "models.yaml")).values()
FAMILIES = {name: preset for family in KNOWN for name, (_, preset, *_) in family.items()}


@pytest.mark.parametrize("deployment", ["single_gpu", "single_node", "multi_node"])
@pytest.mark.parametrize("size", [*SIZES, *FAMILIES])
def test_every_preset_on_every_deployment(tmp_path, monkeypatch, deployment, size):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=8\n")
    hostfile = ["--hostfile", "hosts"] if deployment == "multi_node" else []
    words = ["--deployment-type", deployment, "--actor-model", size, "--reward-model", size, *hostfile]
    plan = make_plan(words, prog="python train.py")
    for planned in plan.chosen:
        assert all(
            "zero_optimization" in made for made in engine_jsons(planned.stage, planned.resolved, ranks=8).values()
        )
        command = command_of(planned, plan.config)
        assert command[:2] == ["bash", str(ROOT / "launch" / f"{deployment}.sh")]
        at = 2 + len(hostfile)
        assert command[2:at] == hostfile
        preset = FAMILIES.get(size, size)
        assert command[at : at + 3] == [
            str(planned.stage.number),
            "--preset",
            f"{PRESETS}/{preset}.yaml",
        ]


def test_models_that_are_known(tmp_path, monkeypatch):
    assert known_model("facebook/opt-6.7b") == KnownModel("6.7b", "", "350m")
    assert known_model("qwen2.5-7b") == KnownModel("8b", "Qwen/Qwen2.5-7B", "qwen2.5-0.5b")
    assert known_model("facebook/opt-iml-1.3b") is None and known_model("gpt2") is None
    switched = {"chat_template_kwargs": "enable_thinking=false"}
    assert known_model("Qwen/Qwen3-4B") == KnownModel("3b", "Qwen/Qwen3-4B", "qwen3-0.6b", switched)
    for typed, right in (("1.2b", "1.3b"), ("qwen3-9b", "qwen3-8b"), ("tniy", "tiny"), ("llama3-8b", "llama-3.1-8b")):
        with pytest.raises(InputError, match=f"got '{typed}'.*did you mean {right}"):
            known_model(typed)
    monkeypatch.chdir(tmp_path)
    for name in ("chinese", "japanese", "t5-3b"):
        command = f"bash launch/single_node.sh 1 --preset launch/presets/{name}.yaml"
        with pytest.raises(InputError) as refused:
            make_plan(["--actor-model", name], prog="python train.py")
        assert str(refused.value) == naming(f"--actor-model ... '{name}' ... stage 1 ... {command}")
        request = parse_request("single_node", command.split()[2:])
        words = [str(ROOT / word) if word.endswith(".yaml") else word for word in request.argv]
        assert request.step == "1" and parse(STAGES[0].config, words, section="sft").config.run.output_dir
    for name in ("7b", "llama-9b", "tniy"):
        (tmp_path / name).mkdir()
        assert known_model(name) is None


@pytest.mark.parametrize(
    ("actor", "preset", "model"),
    [
        ("1.3b", "350m", "facebook/opt-350m"),
        ("tiny", "tiny", "output/demo/base"),
        ("llama-3.1-8b", "1b", "meta-llama/Llama-3.2-1B"),
        ("Qwen/Qwen3-8B", "small", "Qwen/Qwen3-0.6B"),
        ("org/model-7b", "", "org/model-7b"),
    ],
)
def test_a_reward_model_that_is_not_named_reads_the_actors_tokens(tmp_path, monkeypatch, actor, preset, model):
    monkeypatch.chdir(tmp_path)
    stage = make_plan(["--actor-model", actor], prog="python train.py").stages[2]
    assert stage.resolved.config.model.model_name_or_path == model
    assert preset in "".join(stage.argv[:2])


def test_flags_of_a_known_model_are_those_of_its_stages_unless_said_otherwise(tmp_path, monkeypatch):
    """A file and an override win; `none` gives the settings of a run that began without the flag."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("reward:\n  chat_template_kwargs: [enable_thinking=true]\n")

    def found(*words):
        stages = make_plan(["--reward-model", "qwen3-0.6b", *words], prog="python train.py").stages
        return [planned.resolved.config.data.chat_template_kwargs for planned in stages.values()]

    off = ["enable_thinking=false"]
    assert found("--actor-model", "qwen3-8b") == [off] * 3
    assert found("--actor-model", "qwen2.5-7b") == [[], off, []]
    words = ("--actor-model", "qwen3-8b", "--config", "own.yaml", "--ppo.chat-template-kwargs", "none")
    assert found(*words) == [off, ["enable_thinking=true"], []]
    assert found("--actor-model", "qwen3-8b", "--chat-template-kwargs", "a=1", "b=x y") == [["a=1", "b=x y"]] * 3
