"""Help on a flag or a topic, and flags in both spellings: hyphens are printed, underscores are read as well."""

import re

import pytest
from support.messages import naming
from support.source_tree import ROOT

from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import read_command_line
from pipeline.configuration.help import page_of, topic_help
from pipeline.configuration.names import Names
from pipeline.console import shell_lines
from pipeline.launching.request import FLAGS, SWITCHES, parse_request
from pipeline.launching.scripts import launch_file
from rlhf.main import SUBCOMMANDS, run_subcommand
from rlhf.stages import STAGES, stage_of
from rlhf.train import command_for
from rlhf.train_plan import make_plan
from step3_ppo.config import PPOConfig
from step3_ppo.metrics import METRICS as PPO_METRICS
from website import flags as pages

CONFIGS = {**pages.STAGES, **pages.COMMANDS}
MODELS = {
    "sft": "--model",
    "reward": "--model",
    "dpo": "--model",
    "ppo": "--actor-model --critic-model --reward-model --teacher-model",
}
UNDERSCORED = re.compile(r"(?<![\w-])--[a-z][a-z0-9.]*_\w*")


def printed_by(capsys, name: str, *words: str, code: int = 0) -> str:
    """What `rlhf NAME WORDS` prints before it ends with `code`."""
    try:
        ended = run_subcommand(name, [*words], prog=f"rlhf {name}")
    except SystemExit as end:
        ended = end.code or 0
    output = capsys.readouterr()
    assert ended == code
    return output.err if code else output.out


@pytest.mark.parametrize("word", ["kl_coef", "kl-coef", "--kl_coef", "--kl-coef", "ppo.kl_coef", "--ppo.kl-coef"])
def test_the_help_on_a_flag(word, capsys):
    text = printed_by(capsys, "train", "--help", word)
    first, *lines = text.splitlines()
    parts = re.split(r"\n  (?=\S)", ("\n" + "\n".join(lines)).partition("\n\n")[0])[1:]
    rows = {part[:9].strip(): " ".join(part[9:].split()) for part in parts}
    assert first == "--kl-coef float" and "KL penalty" in rows["meaning"]
    assert rows["default"] == "0.1" and rows["read by"] == "ppo"
    assert "grpo 0.0" in rows["set by"] and "rloo 0.05" in rows["set by"] and "command line" in rows["set by"]
    assert "--kl-coef" in (ROOT / rows["page"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("word", ["lora_dim", "actor_lora_dim", "critic_lora_dim"])
def test_the_help_on_loras_rank_advises_on_rank_and_batch(word, capsys):
    meaning, *_ = re.findall(r"^  meaning(.*?)^  default", printed_by(capsys, "train", "--help", word), re.M | re.S)
    assert " ".join(meaning.split()) == naming("Use 32 in stage 3 ... 64 or more ... large data ... 32 rows per step")


def test_who_sets_a_flag(capsys):
    of_plan = " ".join(printed_by(capsys, "train", "--help", "per_device_train_batch_size").split())
    assert "the plan, on GPUs" in of_plan and "--deepspeed-config (train_micro_batch_size_per_gpu)" in of_plan
    assert "--train-batch-size, where that is given" in printed_by(
        capsys, "train", "--help", "gradient_accumulation_steps"
    )
    rate = printed_by(capsys, "train", "--help", "lora_learning_rate")
    assert "other flags (2e-4 in stages 1 and 2" in rate and "--actor-lora-learning-rate" in rate
    assert re.findall(r"default +(\S+)", printed_by(capsys, "train", "--help", "learning_rate"))[:2] == [
        "1e-05",
        "5e-05",
    ]


@pytest.mark.parametrize(
    ("topic", "flags", "page"),
    [
        ("lora", "--lora-dim --only-optimize-lora --quantization", "docs/guides/lora_24gb.md"),
        ("memory", "--gpu-memory-gib --gradient-checkpointing --offload", "docs/guides/out_of_memory.md"),
        ("resume", "--resume --force-resume --keep-checkpoints", "docs/guides/resume.md"),
        ("data", "--data-path --column-map", "docs/guides/"),
        ("reward", "--reward-function --reward-model", "docs/guides/own_reward.md"),
        ("generation", "--generation-engine", "docs/"),
        ("plan", "--dry-run --auto --per-device-train-batch-size", "docs/why/plan.md"),
        ("logging", "--print-steps --monitors", "docs/"),
    ],
)
def test_the_help_on_a_topic(topic, flags, page, capsys):
    text = printed_by(capsys, "train", "--help", topic)
    shown = set(re.findall(r"(?:^|, |  )(--[\w-]+)", text, re.MULTILINE))
    assert set(flags.split()) <= shown
    (path,) = set(re.findall(r"page:? +(docs/\S+)", text)[-1:])
    assert path.startswith(page) and (ROOT / path).is_file()


def test_other_commands_and_other_programs_names(capsys):
    assert "read by  rlhf chat" in printed_by(capsys, "chat", "--help", "repetition_penalty")
    assert "--num-samples-per-prompt int" in printed_by(capsys, "train", "--help", "num_generations")
    text = topic_help("lora_dim", {"python -m step1_sft.main": stage_of("sft").config})
    assert text.startswith("--lora-dim int") and "read by  python -m step1_sft.main" in text


@pytest.mark.parametrize(
    ("word", "nearest"), [("kl_coff", "--kl-coef"), ("reward_modle", "--reward-model"), ("--zzzz", "--help-all")]
)
@pytest.mark.parametrize("command", ["train", "sample"])
def test_an_unknown_word_is_answered_in_a_line(word, nearest, command, capsys):
    (line,) = printed_by(capsys, command, "--help", word, code=2).splitlines()
    assert line == naming(f"error: {word}: ... flag ... topic")
    assert nearest in line or command == "sample"


def test_the_page_of_a_flag_is_there():
    for name, flag in [*flag_table(PPOConfig).items()][::5]:
        text = topic_help(name, {"ppo": PPOConfig})
        path = re.findall(r"page +(docs/\S+?),?(?: which|$)", text, re.MULTILINE)[0]
        assert f"{flag.shown} " in text
        assert (ROOT / path).is_file() or path == "docs/reference/flags.md"


def test_of_pages_that_name_a_flag_as_often_the_one_that_lists_it_wins(tmp_path, monkeypatch):
    texts = {
        "a": "- first, give `--ppo.max-steps 4`",
        "b": "- `--ppo.max-steps-in`\n`--max-steps`",
        "c": "- `--max-steps`",
    }
    (tmp_path / "guides").mkdir()
    for name, text in texts.items():
        (tmp_path / f"guides/{name}.md").write_text(f"{text}\n")
    monkeypatch.setattr("pipeline.configuration.help.DOCS", tmp_path)
    assert page_of(["max_steps"]).endswith("/c.md")
    (tmp_path / "guides/a.md").write_text(2 * texts["a"])
    assert page_of(["max_steps"]).endswith("/a.md"), "more mentions are stronger"


def test_the_group_size_is_explained_by_the_guide_that_lists_it(capsys):
    assert "page     docs/guides/grpo.md\n" in printed_by(capsys, "train", "--help", "num-samples-per-prompt")


@pytest.mark.parametrize("command", [*sorted(SUBCOMMANDS), *(stage.section for stage in STAGES)])
def test_help_has_hyphens(command, capsys):
    if command in SUBCOMMANDS:
        texts = [printed_by(capsys, command, word) for word in ("--help", "--help-all")]
    else:
        config = stage_of(command).config
        texts = [topic_help(name, {"x": config}) for name in ("data", "model", "memory", "optimizer")]
    assert [UNDERSCORED.findall(text) for text in texts] == [[] for _ in texts]


# --- both spellings are read ---


@pytest.mark.parametrize("title", CONFIGS)
def test_every_flag_is_read_in_both_spellings(title):
    names = Names(CONFIGS[title])
    for name, own in names.flag_of.items():
        for spelling in {f"--{name}", "--" + name.replace("_", "-")}:
            given, errors, _ = read_command_line(names, [spelling, "1"])
            assert not errors and set(given) == {name if name in names.switches else own}, spelling


def test_every_flag_of_a_launch_script_is_read_in_both_spellings():
    values = {"launcher": "srun", "log-level": "info"}
    named = (word.removeprefix("--") for names in FLAGS for word in names.split() if word.startswith("--"))
    for name in (name for name in named if name != "launcher-args"):  # which is refused, with what to do instead
        words = [values.get(name, "3"), "1", "--max-seq-len", "9"]
        one, other = (parse_request("multi_node", [f"--{typed}", *words]) for typed in (name, name.replace("-", "_")))
        assert one == other and (one != parse_request("multi_node", words[1:]) or name == "log-level")
    for name in (word.removeprefix("--") for word in (*SWITCHES, "--no-ssh")):
        one, other = (parse_request("multi_node", [f"--{typed}", "1"]) for typed in (name, name.replace("-", "_")))
        assert one == other != parse_request("multi_node", ["1"])


def test_the_command_of_an_older_run_is_read_and_shown_with_hyphens(tmp_path, monkeypatch):
    """A command with underscores, as earlier versions printed it, means what it means with hyphens."""
    monkeypatch.chdir(tmp_path)
    words = ["--actor_model", "tiny", "--output_dir", "out_put", "--max_steps=2", "--ppo.kl_coef", "0.05"]
    older = [*words, "--sft.model_name_or_path", "a_b/c_d"]
    command = command_for(1, older, "rlhf train")
    assert command == (
        "rlhf train --step 1 --actor-model tiny --output-dir out_put --max-steps=2 --ppo.kl-coef 0.05 "
        "--sft.model-name-or-path a_b/c_d"
    )
    plans = [make_plan(argv, prog="x") for argv in (older, command.split()[4:])]
    one, other = ([dict(flat_items(stage.resolved.config)) for stage in plan.chosen] for plan in plans)
    assert one == other and one[0]["max_steps"] == 2 and one[2]["kl_coef"] == 0.05
    line = shell_lines(["bash", str(launch_file("single_gpu.sh")), "--num_gpus", "1", "3", "--kl_coef", "a_b"])
    assert "--num-gpus 1" in line and "--kl-coef a_b" in line


# --- short names of models ---


@pytest.mark.parametrize("section", MODELS)
def test_models_have_short_names_in_help_and_long_ones_are_read(section):
    table, names = flag_table(stage_of(section).config), Names(stage_of(section).config)
    models = {name: flag for name, flag in table.items() if name.endswith("model_name_or_path")}
    assert sorted(flag.shown for flag in models.values()) == sorted(MODELS[section].split())
    for name, flag in models.items():
        assert f"--{name.replace('_', '-')}" in flag.meaning
        assert {names.flag_of[name], names.flag_of[flag.shown[2:].replace("-", "_")]} == {name}


def test_a_metric_is_explained_with_its_stages(capsys):
    page = " ".join(printed_by(capsys, "train", "--help", "groups/equal").split())
    assert page == f"groups/equal of ppo, share: {PPO_METRICS['groups/equal'].meaning}"
    page = printed_by(capsys, "train", "--help", "eval_accuracy")
    assert re.findall(r"^eval_accuracy of (.*), share: ", page, re.MULTILINE) == ["reward", "dpo"]
    page = printed_by(capsys, "train", "--help", "loss")
    assert page.startswith("loss of sft, reward, dpo, nats: ") and "\n\nFlags about loss:\n" in page
    assert "eval_objective/kl of ppo, nats: " in printed_by(capsys, "train", "--help", "eval_objective/kl")
