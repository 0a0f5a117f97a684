"""DPO as a user runs it: its numbers against transformers and torch alone, ranks, resume, outputs, and complaints."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_run import Ended, files_of, run_command, run_until
from support.in_process import refusal_of
from support.messages import naming
from support.model_card import read_card
from support.preference_runs import BETA, NUM_STEPS, RATE, pairs_of, response_log_prob, words
from support.tiny_run import assert_rows_give_means, make_folder, numbers_and_metrics, read_metrics
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from step3_dpo.main import main
from step3_dpo.metrics import METRICS
from step3_dpo.reference import read_tables, write_tables

ONLY_ELSEWHERE = {"z0", "mfu", "gpu_memory_gib", "gpu_reserved_gib", "memory/train_gib"}
EVALUATED = {"per_device_eval_batch_size": 3}
WAYS = {  # name -> ranks and flags: how a step is cut up, and the method
    "whole": (1, {"per_device_train_batch_size": 32}),
    "ipo": (1, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "method": "ipo"}),
    # Of 8 held-out pairs 3 and 2, then 3 and none.
    "zero 3": (2, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "zero_stage": 3} | EVALUATED),
}


@dataclass(frozen=True)
class Trained:
    folder: Path
    ended: dict[str, Ended]

    def run(self, name: str) -> Path:
        return self.folder / name / "runs/dpo"

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in read_metrics(self.run(name)) if "loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = make_folder(tmp_path_factory.mktemp("dpo"), num_train=32)
    ended = {
        name: run_command("step3_dpo", words(folder, name, **flags), folder=folder, ranks=ranks)
        for name, (ranks, flags) in WAYS.items()
    }
    return Trained(folder, ended)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_a_loop_in_torch(trained: Trained, name: str) -> None:
    """All 32 pairs make one step: transformers' logits, torch's AdamW, one pair after the other."""
    assert trained.ended[name].code == 0, trained.ended[name].stderr
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / name / "actor")
    pairs = pairs_of(trained.folder / "train.jsonl", tokenizer)
    model, reference = (AutoModelForCausalLM.from_pretrained(trained.folder / "base").eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    expected = []
    for _ in range(NUM_STEPS):
        total = torch.zeros(())
        for *sides, start in pairs:
            with torch.no_grad():
                known = [response_log_prob(reference, ids, start) for ids in sides]
            ratios = [response_log_prob(model, ids, start) - ref for ids, ref in zip(sides, known, strict=True)]
            if name == "ipo":
                chosen, rejected = (ratio / (len(ids) - start) for ratio, ids in zip(ratios, sides, strict=True))
                total = total + (chosen - rejected - 1 / (2 * BETA)) ** 2 / len(pairs)
            else:
                total = total - logsigmoid(BETA * (ratios[0] - ratios[1])) / len(pairs)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        expected.append(total.item())
    assert expected[0] == pytest.approx(1.0 if name == "ipo" else 0.693147, abs=1e-4)
    assert expected[-1] < 0.9 * expected[0]
    assert trained.losses(name) == pytest.approx(expected, abs=2e-4)


def test_two_ranks_follow_one(trained: Trained) -> None:
    assert trained.losses("zero 3")[:3] == pytest.approx(trained.losses("whole")[:3], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("whole", 2), ("ipo", 1)])
def test_neither_the_order_of_rows_nor_the_zero_stage_changes_a_step(trained: Trained, name: str, stage: int) -> None:
    """Of all rows, from a file in which they stand the other way round, on two ranks."""
    rows = (trained.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (trained.folder / "reversed.jsonl").write_text("".join(reversed(rows)))
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "zero_stage": stage}
    other = f"{name} reversed"
    flags = WAYS[name][1] | cut | {"data_path": trained.folder / "reversed.jsonl"}
    ended = run_command("step3_dpo", words(trained.folder, other, **flags), folder=trained.folder, ranks=2)
    assert ended.code == 0, ended.stderr
    assert trained.losses(other)[:3] == pytest.approx(trained.losses(name)[:3], abs=1e-5)


def test_evaluations_begin_at_the_reference(trained: Trained) -> None:
    first, last = (line for line in read_metrics(trained.run("whole")) if "eval_loss" in line)
    assert first["eval_loss"] == pytest.approx(0.693147, abs=1e-4) and abs(first["eval_margin"]) < 1e-4
    assert last["eval_margin"] > 0.1 and last["eval_accuracy"] > 0.7 and last["eval_rows"] == 8
    rewards = last["eval_mean_chosen_reward"] - last["eval_mean_rejected_reward"]
    assert rewards == pytest.approx(last["eval_margin"], abs=1e-6)
    assert abs(first["eval_kl"]) < 1e-5
    assert_rows_give_means(trained.run("whole"), "eval_accuracy", "eval_margin")
    unknown, unwritten = numbers_and_metrics(trained.run("whole"), METRICS)
    assert (unknown, unwritten) == (set(), ONLY_ELSEWHERE)


def test_the_policy_can_be_loaded_and_shared(trained: Trained) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(trained.folder / "zero 3/actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.model_type == "opt"
    metadata, metrics = read_card(trained.folder / "whole/actor")
    assert metadata["pipeline_tag"] == "text-generation" and "eval_accuracy" in metrics


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_reference(trained: Trained) -> None:
    """The numbers are those of a run that was not stopped, to the bit; the start model's log-probabilities are read."""
    flags = WAYS["whole"][1] | {"save_steps": 1}
    given = words(trained.folder, "stopped", **flags)
    metrics = trained.folder / "stopped/runs/dpo/metrics.jsonl"
    stopped = run_until("step3_dpo", given, folder=trained.folder, metrics=metrics, step=2)
    assert stopped.code == 75, stopped.stderr
    reference = trained.folder / "stopped/runs/dpo/reference.safetensors"
    before = reference.stat().st_mtime_ns
    other = words(trained.folder, "stopped", **flags, model_name_or_path=trained.folder / "whole/actor")
    refused = run_command("step3_dpo", other, folder=trained.folder)
    assert refused.code == 2 and "--model-name-or-path: the content of " in refused.stderr
    assert "reference: " not in refused.stderr and reference.stat().st_mtime_ns == before, refused.stderr
    ended = run_command("step3_dpo", given, folder=trained.folder)
    assert ended.code == 0 and reference.stat().st_mtime_ns == before, ended.stderr
    assert trained.losses("stopped") == trained.losses("whole")
    weights = [files_of(trained.folder / name / "actor") for name in ("stopped", "whole")]
    weights = [{path.name: data for path, data in files.items() if path.suffix == ".safetensors"} for files in weights]
    assert weights[0] and weights[0] == weights[1]


@pytest.mark.slow
def test_a_longer_run_computes_what_is_missing_of_the_reference(trained: Trained) -> None:
    """Two steps read 8 pairs; the run that goes on for another two reads 8 more."""
    flags = {"per_device_train_batch_size": 4, "eval_interval": 1}
    folder, numbers = trained.folder, {}
    for out, lengths in {"parts": (2, 4), "at once": (4,)}.items():
        for steps in lengths:
            ended = run_command("step3_dpo", words(folder, out, **flags, max_steps=steps), folder=folder)
            assert ended.code == 0, ended.stderr
        numbers[out] = trained.losses(out)
    assert len(numbers["parts"]) == 4 and numbers["parts"] == pytest.approx(numbers["at once"], abs=1e-6)


@pytest.mark.parametrize("kept", [0, 4, 40, -8])
def test_a_broken_file_of_the_reference_is_computed_again(kept: int, tmp_path: Path, caplog) -> None:
    tables, path = {"train": np.array([[-1.5, -2.5]])}, tmp_path / "reference.safetensors"
    write_tables(path, "key", tables)
    assert read_tables(path, "key")["train"].tolist() == [[-1.5, -2.5]] and read_tables(path, "other") == {}
    path.write_bytes(path.read_bytes()[:kept])
    assert read_tables(path, "key") == {} and f"{path}: cannot be read" in caplog.text


def test_a_reference_that_is_killed_while_it_is_written_leaves_no_file_that_a_start_refuses(tmp_path, monkeypatch):
    """What a killed start leaves must be hidden or in START_NAMES, else the same command is refused."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_tables(tmp_path / "reference.safetensors", "key", {"train": np.zeros((1, 2))})
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert len([*tmp_path.iterdir()]) == 1


COMPLAINTS = {
    "no pairs": ({"data_path": "answers.jsonl"}, "answers.jsonl"),
    "weight of dpo": ({"desirable_weight": 2}, "--desirable-weight ... --method kto ... dpo"),
    "smoothing of ipo": ({"method": "ipo", "label_smoothing": 0.1}, "--label-smoothing ... --method dpo ... ipo"),
    "log-ratios of dpo": ({"ipo_log_ratios": "sum"}, "--ipo-log-ratios ... --method ipo ... dpo"),
    "a method of ppo": ({"method": "ppo"}, "--method"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_bad_input_is_one_line_and_exit_2(name: str, trained: Trained, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "Who?", "response": "Me."}\n')
    monkeypatch.chdir(tmp_path)
    changes, named = COMPLAINTS[name]
    assert refusal_of(main, words(trained.folder, "bad", **changes), capfd) == naming(named)


@torch.no_grad()
@pytest.mark.parametrize("name", WAYS)
def test_the_last_evaluation_is_that_of_transformers(trained: Trained, name: str) -> None:
    folder = trained.folder / name / "actor"
    last = [line for line in read_metrics(trained.run(name)) if "eval_loss" in line][-1]
    model, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, trained.folder / "base"))
    losses, wins, sums, rewards = [], [], [0.0, 0], ([], [])
    for *sides, start in pairs_of(trained.folder / "test.jsonl", AutoTokenizer.from_pretrained(folder)):
        ratios = []
        for ids, own in zip(sides, rewards, strict=True):
            ratio = response_log_prob(model, ids, start) - response_log_prob(reference, ids, start)
            sums[0], sums[1] = sums[0] + ratio.item(), sums[1] + len(ids) - start
            ratios.append(ratio / (len(ids) - start) if name == "ipo" else ratio)
            own.append(BETA * ratios[-1].item())
        difference = ratios[0] - ratios[1]
        losses.append(((difference - 1 / (2 * BETA)) ** 2 if name == "ipo" else -logsigmoid(BETA * difference)).item())
        wins.append(float(difference > 0) + 0.5 * float(difference == 0))
    chosen, rejected = (sum(own) / len(own) for own in rewards)
    expected = {
        "eval_loss": sum(losses) / len(losses), "eval_accuracy": sum(wins) / len(wins),
        "eval_margin": chosen - rejected,
        "eval_mean_chosen_reward": chosen, "eval_mean_rejected_reward": rejected, "eval_rows": len(losses),
        "eval_kl": sums[0] / sums[1],
    }  # fmt: skip
    assert {key: last[key] for key in expected} == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", WAYS)
def test_before_the_first_step_all_pairs_are_ties(trained: Trained, name: str) -> None:
    """Whatever batches the reference and the evaluation had, on one rank and on two."""
    first = next(line for line in read_metrics(trained.run(name)) if "eval_loss" in line)
    assert first["eval_accuracy"] == 0.5
