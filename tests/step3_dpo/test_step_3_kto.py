"""KTO as a user runs it: its numbers against transformers and torch alone, cuts of a step, labels, resume."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from support.command_run import Ended, files_of, run_command, run_until
from support.in_process import refusal_of
from support.marks import slow_but
from support.messages import naming
from support.preference_runs import BETA, pairs_of, response_log_prob, words
from support.tiny_run import assert_rows_give_means, make_folder, numbers_and_metrics, read_metrics, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.data.batching import epoch_order
from step3_dpo.main import main
from step3_dpo.metrics import METRICS
from step3_dpo.rows import hash_of

NUM_STEPS, RATE, DESIRABLE, UNDESIRABLE = 3, 1e-3, 2.0, 0.25
ONLY_ELSEWHERE = {"mfu", "gpu_memory_gib", "gpu_reserved_gib", "memory/train_gib"}
WAYS = {  # name -> ranks and flags: how a step of all 64 responses is cut up, and where they come from
    "whole": (1, {"per_device_train_batch_size": 64}),
    "labelled": (1, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "data_path": "labels.jsonl"}),
    "ranks": (
        2,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 8,
            "zero_stage": 1,
            "per_device_eval_batch_size": 3,
        },
    ),
    "zero 3": (2, {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 7, "zero_stage": 3}),
}
WAYS["dropout"] = (1, {**WAYS["whole"][1], "lora_dim": 4, "lora_dropout": 0.3, "lora_learning_rate": 2e-2})
Numbers = list[tuple[float, float]]
EVALUATED = [
    f"eval_{name}" for name in ("loss", "z0", "accuracy", "mean_chosen_reward", "mean_rejected_reward", "kl", "rows")
]


def kto_words(folder: Path, out: str, **changes: object) -> list[object]:
    weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
    flags = {"method": "kto", "max_steps": NUM_STEPS, "learning_rate": RATE, **weights, **changes}
    return words(folder, out, **flags)


@dataclass(frozen=True)
class Trained:
    """Runs of WAYS, each made when it is first asked for."""

    folder: Path
    ended: dict[str, Ended] = field(default_factory=dict)

    def run(self, name: str) -> Path:
        if name not in self.ended and name in WAYS:
            ranks, flags = WAYS[name]
            given = kto_words(self.folder, name, **flags)
            self.ended[name] = run_command("step3_dpo", given, folder=self.folder, ranks=ranks)
            assert self.ended[name].code == 0, self.ended[name].stderr
        return self.folder / name / "runs/dpo"

    def numbers(self, name: str) -> Numbers:
        """The loss and z0 of each step."""
        return [(line["loss"], line["z0"]) for line in read_metrics(self.run(name)) if "loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = make_folder(tmp_path_factory.mktemp("kto"), num_train=32)
    pairs = list(map(json.loads, (folder / "train.jsonl").read_text().splitlines()))
    sides = (("chosen", True), ("rejected", False))
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": label} for row in pairs for side, label in sides
    ]
    for row in rows[::3]:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        row["completion"] = [{"role": "assistant", "content": row["completion"]}]
    write_lines(folder / "labels.jsonl", Random(5).sample(rows, len(rows)))
    return Trained(folder)


def responses_of(trained: Trained, file: str) -> list[tuple[list[int], int, bool]]:
    """Ids, length of the prompt and label of both responses of each pair."""
    trained.run("whole")
    tokenizer = AutoTokenizer.from_pretrained(trained.folder / "whole/actor")
    return [
        (ids, start, label)
        for *sides, start in pairs_of(trained.folder / file, tokenizer)
        for ids, label in zip(sides, (True, False), strict=True)
    ]


def by_hand(trained: Trained, steps: list[list[tuple[list[int], int, bool]]]) -> Numbers:
    """Loss and z0 of each step of these responses, each against the one that comes before it by its hash."""
    model, reference = (AutoModelForCausalLM.from_pretrained(trained.folder / "base").eval() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)

    def ratio(ids: list[int], start: int) -> torch.Tensor:
        with torch.no_grad():
            known = response_log_prob(reference, ids, start)
        return response_log_prob(model, ids, start) - known

    numbers = []
    for step in steps:
        rows = sorted(step, key=lambda row: hash_of(row[0], label=row[2]))
        before = zip(rows, rows[-1:] + rows[:-1], strict=True)
        with torch.no_grad():
            behind = [ratio(own[:start] + other[begin:], start).item() for (own, start, _), (other, begin, _) in before]
        z0, total = max(sum(behind) / len(rows), 0.0), torch.zeros(())
        for ids, start, label in rows:
            value = BETA * (ratio(ids, start) - z0)
            total = total + (DESIRABLE * (1 - value.sigmoid()) if label else UNDESIRABLE * value.sigmoid()) / len(rows)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        numbers.append((total.item(), z0))
    return numbers


def near(numbers: Numbers, tolerance: float) -> list[object]:
    return [pytest.approx(pair, abs=tolerance) for pair in numbers]


def test_losses_and_reference_points_are_those_of_a_loop_in_torch(trained: Trained) -> None:
    numbers = trained.numbers("whole")
    assert numbers == near(by_hand(trained, [responses_of(trained, "train.jsonl")] * NUM_STEPS), 5e-4)
    assert numbers[0] == (pytest.approx((DESIRABLE + UNDESIRABLE) / 4, abs=1e-4), pytest.approx(0, abs=1e-4))
    assert numbers[-1][0] < 0.5 * numbers[0][0] and numbers[-1][1] > 1


def test_evaluations_are_of_responses(trained: Trained) -> None:
    first, last = (line for line in read_metrics(trained.run("whole")) if "eval_loss" in line)
    assert first["eval_loss"] == pytest.approx((DESIRABLE + UNDESIRABLE) / 4, abs=1e-4)
    assert abs(first["eval_margin"]) < 1e-4 and abs(first["eval_kl"]) < 1e-4 and abs(first["eval_z0"]) < 1e-4
    assert last["eval_rows"] == 16 and last["eval_accuracy"] > 0.7 and last["eval_margin"] > 0.1 and last["eval_z0"] > 1
    rewards = last["eval_mean_chosen_reward"] - last["eval_mean_rejected_reward"]
    assert rewards == pytest.approx(last["eval_margin"], abs=1e-6)
    assert_rows_give_means(trained.run("whole"), "eval_accuracy", "eval_margin")
    assert numbers_and_metrics(trained.run("whole"), METRICS) == (set(), ONLY_ELSEWHERE)
    assert "32 to train on (sequences: 64)" in trained.ended["whole"].stderr
    assert "(16 responses)" in trained.ended["whole"].stderr


@pytest.mark.parametrize("name", slow_but(["whole"], WAYS))
def test_before_the_first_step_all_responses_are_ties(trained: Trained, name: str) -> None:
    """Each response is as likely as in the reference: its ratio is z0, on one rank and on two."""
    first = next(line for line in read_metrics(trained.run(name)) if "eval_loss" in line)
    assert first["eval_accuracy"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labelled", "ranks", "zero 3"])
def test_a_step_is_the_same_however_it_is_cut_up_and_its_rows_are_ordered(trained: Trained, name: str) -> None:
    """Also of labelled rows in another order, some of them lists of messages, and with rows that fill the step."""
    assert trained.numbers(name) == near(trained.numbers("whole"), 1e-4)
    if name != "labelled":
        mine, whole = (
            [line for line in read_metrics(trained.run(one)) if "eval_loss" in line] for one in (name, "whole")
        )
        assert all(mine[-1][key] == pytest.approx(whole[-1][key], abs=2e-3) for key in EVALUATED)
    if name == "labelled":
        assert "64 to train on, 8 held out" in trained.ended[name].stderr


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(trained: Trained) -> None:
    """With dropout of LoRA; its random numbers are those of the step, and z0 needs none."""
    whole = trained.numbers("dropout")
    given = kto_words(trained.folder, "stopped", **WAYS["dropout"][1], save_steps=1)
    metrics = trained.folder / "stopped/runs/dpo/metrics.jsonl"
    stopped = run_until("step3_dpo", given, folder=trained.folder, metrics=metrics, step=1)
    assert stopped.code == 75, stopped.stderr
    reference = trained.folder / "stopped/runs/dpo/reference.safetensors"
    before = reference.stat().st_mtime_ns
    ended = run_command("step3_dpo", given, folder=trained.folder)
    assert ended.code == 0 and reference.stat().st_mtime_ns == before, ended.stderr
    assert trained.numbers("stopped") == whole != trained.numbers("whole")
    weights = [files_of(trained.folder / name / "actor") for name in ("stopped", "dropout")]
    weights = [{path.name: data for path, data in files.items() if path.suffix == ".safetensors"} for files in weights]
    assert weights[0] and weights[0] == weights[1]


@pytest.mark.slow
def test_a_longer_run_computes_what_is_missing_of_its_mismatches(trained: Trained) -> None:
    """Steps of 24 of 64 responses: the run that goes on mismatches others in a second epoch."""
    flags = {"per_device_train_batch_size": 24, "eval_interval": 1}
    for out, lengths in {"parts": (1, 2, 5), "at once": (5,)}.items():
        for steps in lengths:
            given = kto_words(trained.folder, out, **flags, max_steps=steps)
            ended = run_command("step3_dpo", given, folder=trained.folder)
            assert ended.code == 0, ended.stderr
    assert len(trained.numbers("parts")) == 5 and trained.numbers("parts") == near(trained.numbers("at once"), 1e-5)


@pytest.mark.slow
def test_step_1_takes_the_rows_with_a_true_label(trained: Trained) -> None:
    flags = {"model_name_or_path": "base", "data_path": "labels.jsonl", "data_output_path": "cache", "max_seq_len": 96}
    flags |= {"max_steps": 1, "dtype": "fp32", "output_dir": "sft/sft"}
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    ended = run_command("step1_sft", given, folder=trained.folder)
    assert ended.code == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "labelled false" in line]
    assert line == naming("rows: 32 dropped ... labelled false (first: labels.jsonl:"), ended.stderr


ROWS = {
    "a label that is no boolean": ({"completion": "Me.", "label": 1}, "bad.jsonl:1, got 1"),
    "an empty response": (
        {"completion": None, "label": True},
        "no labelled response ... chosen and rejected ... label",
    ),
    "no label": ({"completion": "Me."}, "label (true or false)"),
    "no response": ({"label": True}, "label (true or false) ... (first: bad.jsonl:1, got 'prompt', 'label')"),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_labels_are_one_line_and_exit_2(name: str, trained: Trained, tmp_path, monkeypatch, capfd) -> None:
    row, named = ROWS[name]
    write_lines(tmp_path / "bad.jsonl", [{"prompt": "Who?", **row}])
    monkeypatch.chdir(tmp_path)
    line = refusal_of(main, kto_words(trained.folder, "bad", data_path="bad.jsonl"), capfd)
    assert line == naming(named) and "bad.jsonl" in line


@torch.no_grad()
def test_the_last_evaluation_is_that_of_transformers(trained: Trained) -> None:
    last = [line for line in read_metrics(trained.run("whole")) if "eval_loss" in line][-1]
    folder = trained.folder / "whole/actor"
    model, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, trained.folder / "base"))
    rows = responses_of(trained, "test.jsonl")
    rows.sort(key=lambda row: hash_of(row[0], label=row[2]))
    assert len({hash_of(ids, label=label) for ids, _, label in rows}) == len(rows)

    def ratio(ids: list[int], start: int) -> float:
        return (response_log_prob(model, ids, start) - response_log_prob(reference, ids, start)).item()

    before = zip(rows, rows[-1:] + rows[:-1], strict=True)
    behind = [ratio((own[:start] + other[begin:])[:96], start) for (own, start, _), (other, begin, _) in before]
    z0 = max(sum(behind) / len(behind), 0.0)
    ratios, labels = np.array([ratio(ids, start) for ids, start, _ in rows]), np.array([label for *_, label in rows])
    sigmoid = 1 / (1 + np.exp(-BETA * (ratios - z0)))
    losses = np.where(labels, DESIRABLE * (1 - sigmoid), UNDESIRABLE * sigmoid)
    expected = {
        "eval_z0": z0, "eval_loss": losses.mean(), "eval_accuracy": np.mean((ratios > z0) == labels),
        "eval_mean_chosen_reward": BETA * ratios[labels].mean(), "eval_rows": len(rows),
        "eval_mean_rejected_reward": BETA * ratios[~labels].mean(),
        "eval_kl": ratios.sum() / sum(len(ids) - start for ids, start, _ in rows),
    }  # fmt: skip
    assert {key: last[key] for key in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_steps_of_a_second_epoch_mismatch_their_own_rows(trained: Trained) -> None:
    """Three steps an epoch, of 24, 24 and 16 of 64 responses; the last two of five are of the second epoch."""
    given = kto_words(trained.folder, "epochs", per_device_train_batch_size=24, max_steps=5, seed=5)
    ended = run_command("step3_dpo", given, folder=trained.folder)
    assert ended.code == 0, ended.stderr
    rows, numbers = responses_of(trained, "train.jsonl"), trained.numbers("epochs")
    orders = [epoch_order(5, epoch, len(rows)) for epoch in (0, 1)]
    places = [orders[step // 3][24 * (step % 3) :][:24] for step in range(5)]
    assert numbers == near(by_hand(trained, [[rows[place] for place in part] for part in places]), 1e-3)
    assert len(numbers) == 5 and numbers[3][1] > 0 and numbers[4][1] > 0
