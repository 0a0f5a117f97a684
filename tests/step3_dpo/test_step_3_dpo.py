"""DPO as a user runs it: its numbers against transformers and torch alone, ranks, resume, outputs, and complaints."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.command_run import Ended, files_of, run_command, run_until
from support.in_process import error_lines, undone_afterwards
from support.model_card import read_card
from support.tiny_run import make_folder, numbers_and_metrics, read_metrics
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from step3_dpo.main import main
from step3_dpo.metrics import METRICS

NUM_STEPS, BETA, RATE = 5, 0.5, 2e-3
ONLY_ELSEWHERE = {"mfu", "gpu_memory_gib", "gpu_reserved_gib", "memory/train_gib"}
WAYS = {  # name -> ranks and flags: how a step is cut up, and the method
    "whole": (1, {"per_device_train_batch_size": 32}),
    "ipo": (1, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "method": "ipo"}),
    "zero 3": (2, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "zero_stage": 3}),
}


def words(folder: Path, out: str, **changes: object) -> list[object]:
    flags: dict[str, object] = {
        "model_name_or_path": folder / "base", "data_path": folder / "train.jsonl", "beta": BETA,
        "eval_data_path": folder / "test.jsonl", "data_output_path": folder / "cache", "max_seq_len": 96,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "num_train_epochs": 9, "max_steps": NUM_STEPS,
        "dtype": "fp32", "max_grad_norm": 0, "adam_beta2": 0.9, "output_dir": f"{out}/actor", **changes,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


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


def pairs_of(file: Path, tokenizer) -> list[tuple[list[int], list[int], int]]:
    """The ids of both sides of each pair by the saved chat template, and the number of those of the prompt."""
    pairs = []
    for row in map(json.loads, file.read_text().splitlines()):
        user = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=True)["input_ids"]
        sides = [
            tokenizer.apply_chat_template([*user, {"role": "assistant", "content": row[side]}], return_dict=True)
            for side in ("chosen", "rejected")
        ]
        chosen, rejected = (side["input_ids"] for side in sides)
        assert chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        pairs.append((chosen, rejected, len(prompt)))
    return pairs


def response_log_prob(model, ids: list[int], start: int) -> torch.Tensor:
    tokens = torch.tensor([ids])
    log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
    return log_probs[start - 1 :].gather(1, tokens[0, start:, None]).sum()


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


def test_evaluations_begin_at_the_reference(trained: Trained) -> None:
    first, last = (line for line in read_metrics(trained.run("whole")) if "eval_loss" in line)
    assert first["eval_loss"] == pytest.approx(0.693147, abs=1e-4) and abs(first["eval_margin"]) < 1e-4
    assert last["eval_margin"] > 0.1 and last["eval_accuracy"] > 0.7 and last["eval_rows"] == 8
    rewards = last["eval_mean_chosen_reward"] - last["eval_mean_rejected_reward"]
    assert rewards == pytest.approx(last["eval_margin"], abs=1e-6)
    unknown, unwritten = numbers_and_metrics(trained.run("whole"), METRICS)
    assert (unknown, unwritten) == (set(), ONLY_ELSEWHERE)


def test_the_policy_can_be_loaded_and_shared(trained: Trained) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(trained.folder / "zero 3/actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.model_type == "opt"
    metadata, metrics = read_card(trained.folder / "whole/actor")
    assert metadata["pipeline_tag"] == "text-generation" and "eval_accuracy" in metrics


def test_a_stopped_run_goes_on_with_its_reference(trained: Trained) -> None:
    """The numbers are those of a run that was not stopped, to the bit; the start model's log-probabilities are read."""
    flags = WAYS["whole"][1] | {"save_steps": 1}
    given = words(trained.folder, "stopped", **flags)
    metrics = trained.folder / "stopped/runs/dpo/metrics.jsonl"
    stopped = run_until("step3_dpo", given, folder=trained.folder, metrics=metrics, step=2)
    assert stopped.code == 75, stopped.stderr
    reference = trained.folder / "stopped/runs/dpo/reference.safetensors"
    before = reference.stat().st_mtime_ns
    ended = run_command("step3_dpo", given, folder=trained.folder)
    assert ended.code == 0 and reference.stat().st_mtime_ns == before, ended.stderr
    assert trained.losses("stopped") == trained.losses("whole")
    weights = [files_of(trained.folder / name / "actor") for name in ("stopped", "whole")]
    weights = [{path.name: data for path, data in files.items() if path.suffix == ".safetensors"} for files in weights]
    assert weights[0] and weights[0] == weights[1]


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


COMPLAINTS = {
    "no pairs": ({"data_path": "answers.jsonl"}, "answers.jsonl"),
    "smoothing of ipo": ({"method": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
    "a method of ppo": ({"method": "ppo"}, "--method"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_bad_input_is_one_line_and_exit_2(name: str, trained: Trained, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "Who?", "response": "Me."}\n')
    monkeypatch.chdir(tmp_path)
    changes, named = COMPLAINTS[name]
    with undone_afterwards():
        assert main([*map(str, words(trained.folder, "bad", **changes))]) == 2
    lines = error_lines(capfd.readouterr().err)
    assert len(lines) == 1 and named in lines[0], lines
