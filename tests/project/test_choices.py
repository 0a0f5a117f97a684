"""The page of choices under a part of a GPU is that of its files, and the plan still chooses so."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.marks import slow_but
from support.source_tree import ROOT

from benchmarks.learning.rows import read_lines
from benchmarks.speed.choices import CHOICES, LARGE, Choice, limit_of, table
from benchmarks.speed.plan_runs import RUNS, make_inputs, read_peaks
from benchmarks.speed.random_models import make_full_tokenizer
from benchmarks.speed.run_list import PlannedRun

RAW = ROOT / "benchmarks/raw"


def kept(report: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The planned and the measured figures of a report, by run."""
    planned, measured = (read_peaks(RAW / f"{report}_202611_{kind}.jsonl.bz2") for kind in ("planned", "measured"))
    return planned, measured


PLANNED, MEASURED = kept("choices_h100")
MADE = [run for run in CHOICES if limit_of(run) != LARGE]
PLANNED_H200, MEASURED_H200 = kept("choices_h200")
ON_H200 = [run for run in CHOICES if limit_of(run) == LARGE]
PLANNED_AGAIN, MEASURED_AGAIN = kept("choices_again_h200")
# Its first update was tried beside the KV cache: the plan did not choose yet to give it back. Made again since then.
TRIED_WITH_CACHE = "72 GiB: PPO, Mistral-7B LoRA 32 and Qwen3-0.6B, 80 rows of 320 + 576"
AGAIN = {
    "24 GiB: SFT, OPT-350M, 64 rows of 512",
    "24 GiB: RLOO, Llama-3-1B LoRA 32, 48 rows of 384 + 640",
    "40 GiB: DPO, Pythia-1.4B, 36 pairs of 320",
    "40 GiB: reward, Llama-3-1B, 60 pairs of 448",
    "24 GiB: reward, Qwen3-0.6B, ZeRO-3, 36 pairs of 896",
    "40 GiB: SFT, OLMo-2-1B, ZeRO-3, 56 rows of 704",
    "40 GiB: REINFORCE++, Llama-3-8B LoRA 32, 72 rows of 320 + 320",
    TRIED_WITH_CACHE,
}


def test_every_choice_was_planned_and_made_below_its_limit():
    assert len(MADE) == 30 and [run.name for run in MADE] == list(PLANNED) and PLANNED.keys() == MEASURED.keys()
    assert [name for name, found in MEASURED.items() if "error" in found] == []
    for run in MADE:
        planned, found = PLANNED[run.name], MEASURED[run.name]
        assert planned["flags"].items() <= found["flags"].items()
        assert planned["high"] <= limit_of(run) and found["phases"]["reserved"] < limit_of(run)


def test_six_were_planned_and_made_again():
    assert list(PLANNED_AGAIN) == list(MEASURED_AGAIN) and next(iter(PLANNED_AGAIN)) == TRIED_WITH_CACHE
    for name, found in MEASURED_AGAIN.items():
        assert PLANNED_AGAIN[name]["flags"] == found["flags"] and found["phases"]["reserved"] < int(name.split()[0])
        assert beyond(PLANNED_AGAIN[name], found) == []


def test_the_choices_of_an_h200_were_planned_and_made_below_their_limit():
    assert [run.name for run in ON_H200] == list(PLANNED_H200) and len(ON_H200) == 6
    assert list(MEASURED_H200) == list(PLANNED_H200)
    assert all(70 / 1.1 < found["high"] <= LARGE for found in PLANNED_H200.values())
    for name, found in MEASURED_H200.items():
        assert PLANNED_H200[name]["flags"].items() <= found["flags"].items() and found["phases"]["reserved"] < LARGE


def beyond(planned: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """The phases that took more than the larger of 5 % and 1 GiB above their plan."""
    phases = {name: gib for name, gib in measured["phases"].items() if name != "reserved"}
    return [name for name, gib in phases.items() if gib > planned["phases"][name] + max(1.0, gib / 20)]


@pytest.mark.parametrize("run", MADE, ids=lambda run: run.name)
def test_no_phase_takes_a_gib_or_a_twentieth_more_than_its_plan(run: PlannedRun):
    found = beyond(PLANNED[run.name], MEASURED[run.name])
    assert found == (["score", "train"] if run.name == TRIED_WITH_CACHE else [])


@pytest.mark.parametrize("name", MEASURED_H200)
def test_none_does_on_an_h200(name: str):
    assert beyond(PLANNED_H200[name], MEASURED_H200[name]) == []


@pytest.mark.parametrize(
    ("page", "planned", "measured"),
    [
        ("h100", PLANNED, MEASURED),
        ("h200", PLANNED_H200, MEASURED_H200),
        ("h200", PLANNED_AGAIN, MEASURED_AGAIN),
    ],
)
def test_the_table_of_a_page_is_that_of_its_files(page: str, planned: dict[str, Any], measured: dict[str, Any]):
    text = (ROOT / f"benchmarks/reports/choices_{page}_202611.md").read_text(encoding="utf-8")
    expected = table(planned, measured)
    assert "\n".join(["", *expected, "", ""]) in text


@pytest.mark.slow
def test_the_rows_of_planned_runs_are_as_long_as_their_plans_say(tmp_path: Path):
    make_inputs(tmp_path, [])
    tokenizer = make_full_tokenizer(tmp_path, {"qwen2.5-0.5b"})

    def tokens(file: str, *columns: str) -> int:
        return min(
            sum(len(tokenizer(row[name])["input_ids"]) for name in columns) for row in read_lines(tmp_path / file)
        )

    def longest(section: str, flag: str) -> int:
        words = [run.words.split() for run in (*RUNS, *CHOICES) if run.section == section]
        return max(int(run[run.index(f"--{flag}") + 1]) for run in words)

    pairs = "pairs.jsonl", "prompt", "rejected"
    assert tokens("sft.jsonl", "prompt", "chosen") >= longest("sft", "max_seq_len")
    assert tokens(*pairs) >= max(longest("reward", "max_seq_len"), longest("dpo", "max_seq_len"))
    assert tokens("prompts.jsonl", "prompt") >= longest("ppo", "max_prompt_seq_len")


def stages_since_then(run: PlannedRun) -> dict[str, int]:
    """The ZeRO stages that the plan chooses today; runs were made in stage 0 where their words name none."""
    models = [word for word in run.words.split() if word.endswith("model_name_or_path")]
    names = [re.sub("^--(.*)model_name_or_path$", r"\1zero_stage", word) for word in models]
    return dict.fromkeys((name for name in names if name not in run.words), 2)


@pytest.mark.parametrize("run", slow_but([], [run for run in MADE if run.name in AGAIN]), ids=lambda run: run.name)
def test_the_plan_still_chooses_so(run: PlannedRun):
    """The same memory, too: on one GPU stage 2 partitions nothing."""
    choice, planned = Choice.of(run), (PLANNED | PLANNED_AGAIN)[run.name]
    later = {} if run.section != "ppo" or run.name in PLANNED_AGAIN else {"release_inference_cache": False}
    before = {name: value for name, value in planned["flags"].items() if not name.endswith("bucket_size")}
    assert choice.flags == before | later | stages_since_then(run), "sizes of buckets are constants now"
    assert choice.phases == pytest.approx(planned["phases"], abs=0.001)
