"""Step 3 as a user runs it: commands in processes of their own, their outputs, and their complaints."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command_run import Ended, files_of, run_command
from support.ds_arguments import zero_file
from support.in_process import refusal_of
from support.messages import naming
from support.model_card import files_that_name, read_card, run_example
from support.run_words import run_stage, run_words, start_flags
from support.tiny_run import make_folder, numbers_and_metrics, read_metrics
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from step3_ppo.main import main
from step3_ppo.metrics import METRICS

NUM_STEPS = 8
TOLERANCE = 1e-5
MODEL_FILES = {
    "README.md", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "training_config.json",
}  # fmt: skip
RUN_FILES = {
    "config.json", "env.json", "log.txt", "rows.json", "metrics.jsonl", "done.json", "samples.jsonl", "checkpoints",
}  # fmt: skip
# Layer by layer, and no more whole at a time than one layer and a part of the next.
ZERO_3: dict[str, object] = {
    "actor_zero_stage": 3, "critic_zero_stage": 3, "zero3_gather": "layers",
    "stage3_max_live_parameters": 20_000,
}  # fmt: skip
# Metrics of GPUs, and of --kl-in-loss.
ONLY_ELSEWHERE = {
    "objective/teacher_kl",  # of --method distill
    "groups/equal",  # several responses to a prompt: test_equal_groups.py
    "groups/further_prompts",
    "tools/turns",  # with --tools: test_tool_runs.py
    "tools/calls",
    "tools/failed_calls",
    "tools/seconds",
    "tools/lost",
    "objective/sampled_scores",
    "policy/weights_cut",
    "loss/entropy_bonus",  # with --entropy-coef
    "policy/weights_rejected",
    "loss/kl",
    "mfu",
    "gpu_memory_gib",
    "gpu_reserved_gib",
    "memory/train_gib",
    "memory/generate_gib",
    "memory/score_gib",
}


def words(folder: Path, out: str, ranks: int, **changes: object) -> list[str]:
    """Two epochs of two updates on each rollout of 8 prompts."""
    flags = start_flags("ppo", folder) | {
        "unsupervised_data_path": folder / "text.jsonl", "unsup_coef": 0.5,
        "actor_learning_rate": 5e-4, "critic_learning_rate": 5e-4, "lr_scheduler_type": "constant",
        "per_device_generation_batch_size": 8 // ranks, "per_device_train_batch_size": 2 // ranks,
        "gradient_accumulation_steps": 2, "ppo_epochs": 2, "kl_target": 0.5, "kl_horizon": 100,
        "enable_ema": "true", "max_steps": NUM_STEPS, "output_dir": out,
    }  # fmt: skip
    return run_words(folder, **flags | changes)


@dataclass(frozen=True)
class Trained:
    folder: Path
    ended: dict[int, Ended]

    def output(self, ranks: int = 1) -> Path:
        return self.folder / f"out{ranks}"

    def run(self, ranks: int = 1) -> Path:
        return self.output(ranks) / "runs" / "ppo"


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """The same run by `python -m` at stage 0 and by torchrun with two ranks at stage 3, as large models have it."""
    ended, partitioned = {}, {"deepspeed_config": zero_file(folder, stage3_max_reuse_distance=0)}
    for ranks, zero in ((1, {}), (2, ZERO_3 | partitioned)):
        command = words(folder, f"out{ranks}", ranks, **zero)
        ended[ranks] = run_command("step3_ppo", command, folder=folder, ranks=ranks)
    return Trained(folder, ended)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ends_well_with_all_files(trained: Trained, ranks: int) -> None:
    assert trained.ended[ranks].code == 0, trained.ended[ranks].stderr
    for name in ("actor", "critic", "actor_ema"):
        assert {path.name for path in (trained.output(ranks) / name).iterdir()} >= MODEL_FILES
    assert {path.name for path in trained.run(ranks).iterdir()} >= RUN_FILES


def test_prompts_and_text_are_shown(trained: Trained) -> None:
    document = json.loads((trained.run() / "rows.json").read_text(encoding="utf-8"))
    samples = [(sample["title"], [part["name"] for part in sample["parts"]]) for sample in document["samples"]]
    assert [title.split()[0] for title, _ in samples] == ["ppo", "ppo", "ppo", "text"]
    assert [names for _, names in samples] == [["prompt"]] * 3 + [["text"]] and document["title"] == "ppo"


@pytest.mark.parametrize("ranks", [1, 2])
def test_piped_output_is_plain(trained: Trained, ranks: int) -> None:
    printed = trained.ended[ranks].stdout + trained.ended[ranks].stderr
    assert "\r" not in printed and "\x1b" not in printed
    assert "Warning" not in printed and "Traceback" not in printed


def training_lines(run: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(run) if "loss/policy" in line]


def test_it_writes_the_metrics_that_its_stage_declares(trained: Trained) -> None:
    unknown, unwritten = numbers_and_metrics(trained.run(), METRICS)
    assert unknown == set()
    assert unwritten == ONLY_ELSEWHERE


def test_metrics_are_json_lines_with_rising_steps(trained: Trained) -> None:
    lines = training_lines(trained.run())
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    rollouts = [line for line in lines if "objective/kl" in line]
    assert [line["step"] for line in rollouts] == [1, 5], "the rollout's own numbers stand on its first step"
    assert all(abs(line["policy/first_ratio_error"]) < TOLERANCE for line in lines)
    assert all("loss/ptx" in line for line in lines)
    evaluations = [line["step"] for line in read_metrics(trained.run()) if "eval_objective/scores" in line]
    assert evaluations == [0, NUM_STEPS]


def test_losses_fall_on_the_same_rollout(trained: Trained) -> None:
    """The two updates of the second epoch see the rows of the first one again."""
    lines = training_lines(trained.run())
    first, second = (sum(line["loss/value"] for line in lines[start : start + 2]) for start in (0, 2))
    assert second < first
    assert lines[-1]["loss/ptx"] < lines[0]["loss/ptx"]


def test_two_ranks_follow_one(trained: Trained) -> None:
    mine, theirs = training_lines(trained.run()), training_lines(trained.run(2))
    for name in ("loss/policy", "loss/value", "loss/ptx", "actor/grad_norm", "critic/grad_norm"):
        assert max(abs(a[name] - b[name]) for a, b in zip(mine[:4], theirs[:4], strict=True)) < TOLERANCE, name


def test_settings_tell_their_origins(trained: Trained) -> None:
    settings = json.loads((trained.run(2) / "config.json").read_text())
    assert (settings["actor_zero_stage"]["value"], settings["actor_zero_stage"]["from"]) == (3, "command line")
    assert (settings["gae_lambda"]["value"], settings["gae_lambda"]["from"]) == (0.95, "default")
    assert json.loads((trained.run(2) / "env.json").read_text())["num_ranks"] == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_load_in_transformers(trained: Trained, ranks: int) -> None:
    for name, auto in (
        ("actor", AutoModelForCausalLM),
        ("actor_ema", AutoModelForCausalLM),
        ("critic", AutoModelForSequenceClassification),
    ):
        _, info = auto.from_pretrained(trained.output(ranks) / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], name


def test_samples_are_readable(trained: Trained) -> None:
    lines = [json.loads(line) for line in (trained.run(2) / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, NUM_STEPS}
    assert all("Human:" in line["prompt"] for line in lines)


def test_an_overwrite_that_is_refused_leaves_the_finished_run(trained: Trained) -> None:
    before = files_of(trained.output())
    command = [*words(trained.folder, "out1", 1, max_prompt_seq_len=500), "--overwrite"]
    over = run_command("step3_ppo", command, folder=trained.folder)
    assert over.code == 2 and "--max-prompt-seq-len + --max-answer-seq-len 5" in over.stderr
    assert trained.run() / "samples.jsonl" in before and files_of(trained.output()) == before


def test_tokens_that_only_a_padded_vocabulary_has_are_never_sampled(trained: Trained, tmp_path: Path) -> None:
    """The critic has no embedding for ids that the actor's 4096 rows would give it."""
    actor = AutoModelForCausalLM.from_pretrained(trained.folder / "base")
    num_tokens = actor.config.vocab_size
    actor.resize_token_embeddings(4096, mean_resizing=False)
    actor.save_pretrained(tmp_path / "padded")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "padded" / name).write_bytes((trained.folder / "base" / name).read_bytes())
    changes = {"actor_model_name_or_path": tmp_path / "padded", "max_steps": 1, "enable_ema": "false"}
    assert run_stage("ppo", words(trained.folder, str(tmp_path / "out"), 1, **changes)) == 0
    assert num_tokens < 4096
    samples = [json.loads(line) for line in (tmp_path / "out/runs/ppo/samples.jsonl").read_text().splitlines()]
    assert any(sample["response"] for sample in samples)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"max_steps": 2}, 2),
        ({"max_steps": 2, "dry_run": "true"}, 2),
        ({"max_steps": 0, "num_train_epochs": 0.1}, 4),
    ],
)
def test_a_warm_up_as_long_as_the_run_is_refused(trained: Trained, tmp_path, monkeypatch, capsys, flags, steps) -> None:
    """Nothing would train the policy. No model is loaded before that is said."""
    monkeypatch.setattr("step3_ppo.build.make_models", None)
    changes = {**flags, "critic_warmup_steps": steps, "enable_ema": "false"}
    assert run_stage("ppo", words(trained.folder, str(tmp_path / "out"), 1, **changes)) == 2
    said = naming(f"--critic-warmup-steps ... {steps} ... {steps} steps")
    assert capsys.readouterr().err == said


def test_the_models_can_be_shared(trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    cards = {
        "actor": ("text-generation", "PPO-tuned model"),
        "actor_ema": ("text-generation", "Moving average of a PPO-tuned model"),
        "critic": ("text-classification", "PPO critic"),
    }
    for name, (task, heading) in cards.items():
        folder = trained.output() / name
        metadata, metrics = read_card(folder)
        assert f"\n# {heading}\n" in (folder / "README.md").read_text()
        assert metadata["pipeline_tag"] == task and "eval_objective/scores" in metrics
        assert files_that_name(trained.folder, folder) == []
        run_example(folder, monkeypatch)
        assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("bad"), num_train=12, num_test=2)
    make_stranger(folder)
    return folder


def make_stranger(folder: Path) -> None:
    """`stranger/`: the scorer with a tokenizer of other words."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer")
    model.save_pretrained(folder / "stranger")
    vocabulary = {"<unk>": 0, "<pad>": 1, "</s>": 2, "otter": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "stranger")


COMPLAINTS = {
    "critic with another tokenizer": ({"critic_model_name_or_path": "stranger"}, "tokenizer"),
    "critic without a head": ({"critic_model_name_or_path": "base"}, "no reward head"),
    "rows that do not divide": ({"per_device_train_batch_size": 3}, "the nearest that fit are"),
    "too many tokens": ({"max_answer_seq_len": 4096}, "positions"),
    "a baseline of one response": ({"group_baseline": "true"}, "give 2 or more"),
    "k1 in the loss": ({"kl_in_loss": "true"}, "k1"),
    "sampler's log-probs": ({"old_log_probs": "sampler"}, "--old-log-probs ... sampler ... 4"),
    "no such actor": ({"actor_model_name_or_path": "./absent"}, "absent"),
    "offload of a plain reference": (
        {"offload_reference_model": "true", "actor_zero_stage": 0},
        "--offload-reference-model / --offload-reward-model: need",
    ),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_bad_input_is_one_line_and_exit_2(
    name: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, named = COMPLAINTS[name]
    monkeypatch.chdir(bad_files)
    line = refusal_of(main, words(bad_files, "bad-out", 1, **changes), capfd)
    assert line.startswith("error: ") and line == naming(named)
