"""A policy loss in a user's file, `--policy-loss FILE.py:NAME`: what it gets, what becomes of what it returns."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_run import run_command
from support.messages import naming
from support.pages import blocks
from support.ppo_runs import ppo_words, run_ppo
from support.reward_rows import rows_of
from support.source_tree import ROOT
from support.tiny_run import read_metrics

from pipeline.checkpoints.shared_names import shareable_flags
from pipeline.configuration.flags import parse
from pipeline.errors import InputError
from pipeline.models.forward.causal_lm import TokenStatistics
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Experience
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.flags.loss_file import load_loss
from step3_ppo.objectives import PolicyObjective, StepSize, Sums

FOLDER_SIZES = {"num_train": 16, "num_test": 4}
PAGE = (ROOT / "docs" / "guides" / "own_loss.md").read_text(encoding="utf-8")
CODE = """
import torch
from beside import SIGN

def ppo(log_probs, old_log_probs, advantages, policy_clip):
    # The clipped loss as the paper writes it.
    ratio = (log_probs - old_log_probs).exp()
    return SIGN * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - policy_clip, 1 + policy_clip))

def capped_by_length(log_probs, old_log_probs, advantages, response_mask, *, ratio_cap):
    # A sequence's mean ratio, cut at the cap and without a gradient, weighs the log-probability of each of its tokens.
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)
    ratio = ((log_probs - old_log_probs).detach().sum(1, keepdim=True) / lengths).exp().clamp(max=ratio_cap)
    bad = torch.where(response_mask, 0.0, torch.nan)  # is not read
    return -ratio * advantages * log_probs + bad

def needs(log_probs, rewards): return log_probs
def only(log_probs, /): return log_probs
def raises(log_probs): raise ValueError("no\\nluck")
def leaves(log_probs): raise SystemExit(3)
def mean(log_probs, advantages): return -(log_probs * advantages).mean()
def short(log_probs): return log_probs[:, 1:]
def detached(log_probs): return log_probs.detach()
def nothing(log_probs): pass
def other_leaf(log_probs): return torch.ones(log_probs.shape, requires_grad=True)
def nan(log_probs): return log_probs.log()
def late_nan(log_probs, advantages): return torch.where(log_probs < -2.5, torch.nan, log_probs * advantages)
def late_error(log_probs):
    if log_probs.shape[1] > 2:
        raise RuntimeError("too long")
    return -log_probs
"""
REFUSED = {
    "needs": "'rewards'; .* log_probs, old_log_probs, advantages, response_mask, policy_clip",
    "only": "'log_probs' cannot be given",
    "missing": "'missing', only ppo, capped_by_length",
    "raises": r"ValueError: no luck \(losses.py:\d+\)",
    "leaves": r"SystemExit: 3 \(losses.py:\d+\)",
    "mean": r"Tensor \[\], .* \[2, 2\]",
    "short": r"Tensor \[2, 1\], .* \[2, 2\]",
    "detached": r"Tensor \[2, 2\], .* with a gradient",
    "nothing": "NoneType .* a tensor",
    "other_leaf": "RuntimeError: .* differentiated Tensor .* not have been used",
    "nan": "from -2 to -0.5 .* nan",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("SIGN = 1")
    (tmp_path / "losses.py").write_text(f"# {tmp_path}\n{CODE}")  # a process imports a content once
    return tmp_path / "losses.py"


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_function_is_told_in_one_line_with_its_file(file: Path, name: str) -> None:
    with pytest.raises(InputError, match=REFUSED[name]) as error:
        load_loss(PPOCoefficients(policy_loss=f"{file}:{name}"))
    assert str(error.value).startswith(f"--policy-loss {file}:{name}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("clippd", "--policy-loss clippd ... clipped or cispo or FILE.py:NAME"),
        ("losses.py", "--policy-loss losses.py: names no function"),
        ("los.py:ppo", "los.py cannot be read (No such file or directory) ... losses.py"),
    ],
)
def test_a_text_that_names_no_function(file: Path, monkeypatch: pytest.MonkeyPatch, value: str, found: str) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(InputError, match=naming(found)):
        parse(
            PPOConfig,
            ["--actor-model", "a", "--critic-model", "c", "--data-path", "d", "--policy-loss", value],
            section="ppo",
        )


def test_a_flag_that_the_function_does_not_take_is_refused(file: Path) -> None:
    flags: dict[str, Any] = {"policy_loss": f"{file}:ppo", "policy_clip": 0.1}
    assert load_loss(PPOCoefficients(**flags)) is not None
    with pytest.raises(InputError, match=naming("no argument dual_clip ... --dual-clip")):
        load_loss(PPOCoefficients(**flags, dual_clip=3.0))


def objective_loss(name: str, **flags: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    """A policy objective's loss on three rows, of which one is masked; its gradient, and its inputs (4, 3, 3)."""
    generator, lengths = torch.Generator().manual_seed(3), [3, 1, 2]
    inputs = torch.randn(4, 3, 3, generator=generator)
    new, old, sampled, advantages = (one.clone() for one in inputs)
    responses = replace(rows_of(lengths, [True] * 3), sampler_log_probs=sampled)
    mask = responses.response_mask & torch.tensor([True, False, True]).unsqueeze(1)
    known = Experience(mask, old, old, torch.where(mask, advantages, torch.nan), None)
    new.requires_grad_(True)
    ppo = PPOCoefficients(policy_loss=name, **flags)
    objective = PolicyObjective(
        engine=lambda *_, **settings: TokenStatistics(log_probs=new), kl_coef=0.0,
        temperature=1.0, unsup_coef=0.0, world=None, longest=8, ppo=ppo,
        size=StepSize(9, 0, 0, 40, num_trained=30, num_trained_rows=7), own_loss=load_loss(ppo),
    )  # fmt: skip
    loss = objective.loss(MicroBatch((0, 1, 2), 4, 3, 6), responses, known, Sums())
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad, inputs


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_loss_of_ones_own_equals_a_slow_loop(file: Path, aggregation: str) -> None:
    """Aggregation and off-policy weights are the pipeline's; row 1 is masked, and what stands outside is not read."""
    flags = {"off_policy_weights": "token_truncate", "off_policy_cap": 1.5, "loss_aggregation": aggregation}
    loss, gradient, inputs = objective_loss(f"{file}:capped_by_length", ratio_cap=1.2, **flags)
    new, old, sampled, advantages = inputs.tolist()
    expected, of_new = 0.0, torch.zeros(3, 3)
    for n, length in ((0, 3), (2, 2)):
        factor = {"token_mean": 1.0, "sequence_mean": 30 / (7 * length), "constant": 30 / (7 * 8)}[aggregation]
        mean = sum(new[n][t] - old[n][t] for t in range(length)) / length
        for t in range(length):
            weight = factor * min(math.exp(old[n][t] - sampled[n][t]), 1.5) * min(math.exp(mean), 1.2)
            expected -= weight * advantages[n][t] * new[n][t]
            of_new[n, t] = -weight * advantages[n][t]
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, of_new, rtol=1e-5, atol=1e-7)


def test_the_loss_of_the_page_is_what_the_page_says(tmp_path: Path) -> None:
    ((name, code),) = blocks(PAGE, "python")
    (tmp_path / name).write_text(code, encoding="utf-8")
    loss, _, (new, old, _, advantages) = objective_loss(f"{tmp_path / name}:soft_clip", policy_clip=0.3)
    expected = 0.0
    for n, t in ((0, 0), (0, 1), (0, 2), (2, 0), (2, 1)):
        ratio, advantage = math.exp(new[n, t] - old[n, t]), advantages[n, t].item()
        bounded = 1 + 0.3 * math.tanh((ratio - 1) / 0.3)
        expected -= min(ratio * advantage, bounded * advantage)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_page_names_each_argument() -> None:
    from step3_ppo.flags.loss_file import SETTINGS, TENSORS

    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert named == [*TENSORS, *SETTINGS]


def test_an_error_in_a_run_is_one_line_and_one_of_memory_is_not(file: Path) -> None:
    with pytest.raises(InputError, match=naming(f"--policy-loss {file}:late_error ... too long (losses.py:")):
        objective_loss(f"{file}:late_error")
    file.write_text("def full(log_probs):\n    if log_probs.shape[1] > 2: raise MemoryError\n    return -log_probs\n")
    with pytest.raises(MemoryError):
        objective_loss(f"{file}:full")


def test_a_card_names_the_file_without_its_folder(file: Path) -> None:
    words = ["--actor-model", "a", "--critic-model", "c", "--data-path", "d", "--policy-loss", f"{file}:ppo"]
    config = parse(PPOConfig, words, section="ppo").config
    assert shareable_flags(config)["policy_loss"] == "losses.py:ppo"


# --- runs ------------------------------------------------------------------------------------------------------------


def words_of(folder: Path, out: Path, **changes: Any) -> list[str]:
    flags = {
        "critic_model_name_or_path": folder / "scorer", "eval_data_path": None, "eval_fraction": 0.25,
        "train_batch_size": 4, "rollout_batch_size": 8, "ppo_epochs": 2, "per_device_train_batch_size": 1,
        "actor_learning_rate": 1e-2, "lr_scheduler_type": None, "max_steps": 4, "save_steps": 2, "policy_clip": 0.01,
        "old_log_probs": "trainer",
    }  # fmt: skip
    return ppo_words(folder, out, **flags | changes)


def trained(folder: Path, out: Path, **changes: Any) -> int:
    return run_ppo(words_of(folder, out, **changes))


def without_times(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, but for those of time and memory."""
    lines = read_metrics(out / "runs/ppo")
    return [
        {name: value for name, value in line.items() if not re.search("_s$|^time|memory|per_s|mfu|flops|gib", name)}
        for line in lines
    ]


@pytest.mark.slow
def test_the_clipped_loss_in_a_file_gives_the_same_run(folder: Path, file: Path, tmp_path: Path) -> None:
    """Metrics and weights bit by bit, with micro-batches of a row; then the file is changed, and a resume names it."""
    assert trained(folder, tmp_path / "built-in") == 0
    assert trained(folder, tmp_path / "own", policy_loss=f"{file}:ppo") == 0
    metrics = without_times(tmp_path / "own")
    assert metrics == without_times(tmp_path / "built-in")
    assert any(line.get("policy/clipfrac") for line in metrics), "the clip acts"
    weights = [(tmp_path / one / "actor/model.safetensors").read_bytes() for one in ("built-in", "own")]
    assert weights[0] == weights[1]
    assert "losses.py:ppo" in (tmp_path / "own/actor/README.md").read_text()


@pytest.mark.slow
def test_a_run_with_a_changed_file_is_not_resumed(folder, file, tmp_path, capsys) -> None:
    out, loss = tmp_path / "out", f"{file}:ppo"
    assert trained(folder, out, policy_loss=loss, max_steps=2) == 0
    for changed, title in (
        (file, "file of policy loss ppo"),
        (file.parent / "beside.py", "beside.py of policy loss ppo"),
    ):
        before = changed.read_text()
        changed.write_text(before + "\n# other words\n")
        capsys.readouterr()
        assert trained(folder, out, policy_loss=loss) == 2
        (line, *_) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert re.fullmatch(f"error: {title}: .* [0-9a-f]{{12}}, .* [0-9a-f]{{12}}", line)
        changed.write_text(before)
    assert trained(folder, out, policy_loss=loss) == 0
    assert json.loads((out / "runs/ppo/metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


@pytest.mark.slow
def test_two_ranks_use_the_loss_and_a_wrong_one_ends_before_the_start(folder: Path, file: Path, tmp_path: Path) -> None:
    loss, runs = f"{file}:ppo", {}
    for name, value in (("own", loss), ("clipped", "clipped")):
        words = words_of(folder, tmp_path / name, policy_loss=value, max_steps=2)
        done = run_command("step3_ppo", words, folder=tmp_path, ranks=2)
        assert done.code == 0, done.stderr[-2000:]
        runs[name] = without_times(tmp_path / name)
    assert runs["own"] == runs["clipped"] and any(line.get("loss/policy") for line in runs["own"])
    done = run_command(
        "step3_ppo", words_of(folder, tmp_path / "no", policy_loss=f"{file}:mean", policy_clip=None), folder=tmp_path
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.code == 2 and len(lines) == 1 and f"--policy-loss {file}:mean: returned Tensor []" in lines[0]


@pytest.mark.slow
def test_a_loss_that_is_nan_in_the_run_drops_the_step_as_a_built_in_one_does(folder, file, tmp_path, capsys) -> None:
    assert trained(folder, tmp_path / "out", policy_loss=f"{file}:late_nan", policy_clip=None) == 4
    (line, *_) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "not finite" in line or "non-finite" in line, line
