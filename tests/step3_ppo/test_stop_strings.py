"""--stop-strings of stage 3: in rollouts and evaluations a response ends with the token that completes one."""

import json
from pathlib import Path
from typing import Any

import pytest
from input_calls import Ending, call, stage_words
from support.marks import slow
from support.messages import naming
from support.tiny_run import read_metrics
from transformers import AutoTokenizer

from pipeline.configuration.flags import parse
from pipeline.configuration.resume_rules import differences, record_of
from step3_ppo.config import PPOConfig
from step3_ppo.rollout import make_sampling, sampling_line

FOLDER_SIZES = {"num_train": 8, "num_test": 4}
SIZES = {"per_device_train_batch_size": 4, "max_answer_seq_len": 12, "missing_eos_penalty": 4.0}


def run(folder: Path, out: Path, **flags: Any) -> tuple[Ending, Path]:
    words = stage_words("ppo", folder, out, data_output_path=folder / "cache", **{**SIZES, **flags})
    return call("ppo", words), out / "model" / "runs" / "ppo"


def samples_of(run_folder: Path) -> list[dict[str, Any]]:
    """What the actor answered before it learned anything."""
    lines = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["step"] == 0]


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ending, run_folder = run(folder, tmp_path_factory.mktemp("plain"))
    assert ending.code == 0, ending.stderr
    return samples_of(run_folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["eager", "static", slow("fused")])
def test_a_run_stops_its_responses_and_counts_them_as_finished(
    backend: str, folder: Path, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    text = next(line["response"] for line in plain if not line["finished"])
    stop = [text[len(text) // 2 :][:2], "never"]
    ending, run_folder = run(folder, tmp_path, stop_strings=stop, generation_engine=backend)
    assert ending.code == 0, ending.stderr
    assert f"or {stop[0]!r} or 'never'; one response per prompt" in (run_folder / "log.txt").read_text()
    stopped = 0
    for mine, theirs in zip(samples_of(run_folder), plain, strict=True):
        if not any(one in theirs["response"] for one in stop):
            assert (mine["response"], mine["finished"]) == (theirs["response"], theirs["finished"])
            continue
        stopped += 1
        assert theirs["response"].startswith(mine["response"]) and mine["tokens"] < theirs["tokens"]
        before = tokenizer.decode(tokenizer(mine["response"], add_special_tokens=False)["input_ids"][:-1])
        assert any(one in mine["response"] for one in stop) and not any(one in before for one in stop)
        assert mine["finished"]
    assert stopped
    finished = [line["finished"] for line in samples_of(run_folder)]
    (first,) = [line for line in read_metrics(run_folder) if line["step"] == 0]
    assert first["eval_completions/eos_fraction"] == sum(finished) / len(finished)
    assert first["eval_completions/truncated_fraction"] == 1 - sum(finished) / len(finished)


def test_a_stopped_response_costs_no_penalty(folder: Path, tmp_path: Path) -> None:
    """All end with their first token: whatever the penalty, the rewards are the same."""
    found = []
    for penalty in (0.0, 4.0):
        letters = [chr(number) for number in range(33, 127)] + [" ", "\ufffd", "\n", "\u0120"]
        flags = {"stop_strings": letters, "missing_eos_penalty": penalty}
        ending, run_folder = run(folder, tmp_path / str(penalty), **flags)
        assert ending.code == 0, ending.stderr
        lines = [line for line in read_metrics(run_folder) if "objective/rlhf_reward" in line]
        assert lines[0]["completions/eos_fraction"] == lines[0]["completions/empty_fraction"] == 1.0
        found.append(lines[0]["objective/rlhf_reward"])
    assert found[0] == found[1]


def test_settings_and_the_rule_of_resumed_runs() -> None:
    plain, stopping = (
        parse(PPOConfig, words, section="ppo").config for words in ([], ["--stop-strings", "\n\nHuman:", "</s>"])
    )
    assert make_sampling(plain).stop == () and make_sampling(stopping).stop == ("\n\nHuman:", "</s>")
    assert "ended by id 2; one" in sampling_line(plain, [2], {})
    saved = record_of(plain, 1, "same")
    del saved["settings"]["stop_strings"]  # as an earlier version wrote it
    assert list(differences(saved, record_of(plain, 1, "same"), plain)) == []
    (line,) = differences(saved, record_of(stopping, 1, "same"), stopping)
    assert line == naming(r"--stop-strings ... ['\n\nHuman:', '</s>'] ... checkpoint ... []")


def test_an_empty_string_is_refused(folder: Path, tmp_path: Path) -> None:
    ending, _ = run(folder, tmp_path, stop_strings=["a", ""])
    assert ending.code == 2 and len(ending.errors) == 1
    assert ending.errors[0] == naming("error: --stop-strings ... '' (command line)")
