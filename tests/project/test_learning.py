"""The experiment of benchmarks/learning: its estimates against slow loops, and the whole of it on a tiny model."""

import copy
import gzip
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.kept_tables import table_lines
from support.source_tree import ROOT
from support.tiny_models import save_tiny
from support.tiny_run import make_pair, make_prompts

from benchmarks.learning import estimates, quality, quality_report, recipes, report, rows, workers
from benchmarks.learning.jobs import Jobs
from benchmarks.learning.policies import file_name
from benchmarks.learning.run import pairs_of
from pipeline.configuration.flags import parse
from pipeline.rewards.box.instructions import CHECKS, instructions
from rlhf.rewards.sample import SampleConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig

TABLES = "recipes_202611.jsonl.bz2"  # those for which the pages have no room
CONFIGS = {
    "step3_ppo.main": (PPOConfig, "ppo"), "step3_dpo.main": (DPOConfig, "dpo"),
    "rlhf.rewards.sample": (SampleConfig, "sample"),
}  # fmt: skip


def test_best_of_n_is_the_mean_over_all_subsets():
    random = Random(0)
    proxy, gold = [[random.gauss(0, 1) for _ in range(7)] for _ in range(2)]
    for k in (1, 3, 7):
        best = [max(subset, key=proxy.__getitem__) for subset in itertools.combinations(range(7), k)]
        expected = [sum(scores[n] for n in best) / len(best) for scores in (proxy, gold)]
        assert estimates.best_of(k, proxy, gold) == pytest.approx(expected)
    assert estimates.best_of_kl(1) == 0 and estimates.best_of_kl(4) == pytest.approx(1.3862944 - 0.75)


def test_a_policy_that_wins_by_length_alone_does_not_win_at_equal_length():
    random = np.random.default_rng(0)
    apart = random.normal(40, 30, 2000)
    other = random.normal(0, 1, 2000)
    longer = estimates.length_controlled(other + apart / 20, other, 100 + apart, np.full(2000, 100))
    assert np.mean(apart > 0) > 0.85 and longer < 0.6
    better = estimates.length_controlled(other + random.normal(0.8, 1, 2000), other, 100 + apart, np.full(2000, 100))
    assert better == pytest.approx(0.79, abs=0.03), "P(N(0.8, 1) > 0)"


def test_distinct_counts_grams_over_all_texts():
    assert estimates.distinct(["a b a b", "b a"], 2) == pytest.approx(2 / 4)
    assert math.isnan(estimates.distinct(["a"], 2))


def test_the_halves_share_no_prompt():
    halves = [rows.half(f"prompt {n}") for n in range(1000)]
    assert 450 < halves.count("gold") < 550 and halves == [rows.half(f"prompt {n}") for n in range(1000)]


def test_an_ablation_is_beyond_noise_at_two_errors_of_both_kinds():
    """Two runs of each; two answers that are 2 apart have a variance of 2, their mean 1, that of two runs 1/2."""

    def run(name: str, seed: int, *golds: float) -> report.Run:
        before, after = ([{"gold": gold, "proxy": 0.0} for gold in scores] for scores in ((-1.0, 0.0, 1.0), golds))
        return report.Run(name, "proxy-2", seed, {0: before, 9: after})

    runs = [run("as it is", seed, 0.0, 2.0) for seed in (1, 2)]  # means 1 and 1: seeds do not spread
    runs += [run("far", 1, 5.0, 5.0), run("far", 2, 6.0, 6.0)]  # 4.5 above; variance of the seeds 1/2, over 2: 1/4
    runs += [run("spread", 1, 1.0, 1.0), run("spread", 2, 11.0, 11.0)]  # 5 above; 50 / 2 = 25: the seeds' error is 5
    runs += [run("near", 1, 2.2, 4.2), run("near", 2, 2.2, 4.2)]  # 2.2 above; 1/2 + 1/2: the answers' error is 1
    runs += [run("near 2", 1, 1.5, 3.5), run("near 2", 2, 1.5, 3.5)]  # 1.5 above
    lines = report.differences(runs).splitlines()[2:]
    spread = (2 * 10 / 29) ** 0.5  # of the thirty first answers
    expected = [("far", 4.5, 0.5, 0.25, "beyond"), ("spread", 5.0, 0.5, 25.0, "within"),
                ("near", 2.2, 1.0, 0.0, "beyond"), ("near 2", 1.5, 1.0, 0.0, "within")]  # fmt: skip
    assert lines == [
        f"| {name} | 2 | {apart / spread:+.2f} +- {(a**0.5) / spread:.2f} | +- {(b**0.5) / spread:.2f} | {word} noise |"
        for name, apart, a, b, word in expected
    ]


def test_separators_within_a_text_end_no_line(tmp_path):
    lines = [{"prompt": "one\u2028two\x85three\u2029"}, {"prompt": "four"}]
    rows.write(tmp_path / "rows.jsonl", lines)
    assert rows.read_lines(tmp_path / "rows.jsonl") == lines


def test_the_slope_of_a_score_is_that_within_prompts():
    """Between prompts the score falls with length; within each it grows by 0.5 and 0.25 a token for two scores."""
    lines = [
        {"prompt": prompt, "tokens": 100 * prompt + n, "a": 0.5 * n - 90 * prompt, "b": 0.25 * n}
        for prompt in range(3)
        for n in range(4)
    ]
    assert quality.slope_of(lines, ("a",)) == pytest.approx(0.5)
    assert quality.slope_of(lines, ("a", "b")) == pytest.approx(0.375), "of the mean of both"
    assert quality.slope_of(lines[:1], ("a",)) == 0, "one answer has no slope"


@pytest.mark.parametrize("name", recipes.recipes([1, 2, 3]))
def test_a_recipe_is_commands_that_its_stages_take(name, tmp_path, monkeypatch):
    """The deviations of scores are 2 of shallow proxies and 4 of the others."""
    slopes = {"proxy-1": 0.5, "proxy-2": 0.25, "balanced-1": 2, "balanced-2": 1}
    for model in ("sft", *slopes):
        (tmp_path / "models" / model).mkdir(parents=True)
        (tmp_path / "models" / model / "config.json").write_text(json.dumps({"score_std": 4 if "2" in model else 2}))
    for folder in ("quality", "data"):
        (tmp_path / folder).mkdir()
    answers = [{"prompt": 0, "tokens": n} | {model: slope * n for model, slope in slopes.items()} for n in range(4)]
    rows.write(tmp_path / "quality" / "sft.jsonl", answers)
    rows.write(tmp_path / "data" / "prompts.jsonl", [{"prompt": f"{n}"} for n in range(200)])
    ran = dict[str, Any]()

    def run(self: Jobs, name: str, module: str, words: list[object], *, gpu: int | None = None) -> str:
        (tmp_path / "runs" / f"{file_name(recipe)}-seed7-models").mkdir(exist_ok=True)
        if module == "benchmarks.learning.workers":
            assert list(words[:2]) == ["rounded", 8]
            module, words, ran["rounded"] = "step3_ppo.main", words[2:], True
        if module in CONFIGS:
            config, section = CONFIGS[module]
            ran[module] = parse(config, [str(word) for word in words], section=section).config
        return ""

    recipe = name
    monkeypatch.setattr(Jobs, "run", run)
    depths, output = [1, 2, 3], tmp_path / "quality" / f"{file_name(name)}-seed7.jsonl"
    one = recipes.recipes(depths)[name]
    quality.one(Jobs(tmp_path, 0, 1), depths, one, 7, 20, output, {"gpu_memory_gib": "9"}, None)
    trained = ran["step3_dpo.main" if one.method == "dpo" else "step3_ppo.main"]
    assert (trained.run.seed, trained.run.max_steps, trained.run.gpu_memory_gib) == (7, 20 * one.steps, 9.0)
    assert ("rlhf.rewards.sample" in ran) is (one.pairs == recipes.SAMPLED)
    if one.pairs == recipes.SAMPLED:
        sampled = ran["rlhf.rewards.sample"]
        prompts = len(rows.read_lines(Path(sampled.data[0])))
        assert prompts * sampled.sampling.n == 20 * 64, "as many answers as PPO samples"
    assert ("rounded" in ran) is ("of 8 bits" in name)
    if one.method != "dpo":
        assert trained.rollout_size(1).responses == 64 and trained.ppo.method == one.method
        functions = trained.reward_functions
        slope = sum(slopes[proxy] / (4 if "2" in proxy else 2) for proxy in one.proxies) / len(one.proxies)
        expected = one.length_out * 256 * slope
        assert [function.weight for function in functions] == pytest.approx([expected] if expected else [])


def test_a_rounded_sampler_reads_rounded_matrices_and_training_its_own(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)).bfloat16()
    before, read = copy.deepcopy(model.state_dict()), list[dict[str, torch.Tensor]]()

    @contextmanager
    def generation(self: Any) -> Iterator[None]:
        read.append(copy.deepcopy(self.source.model.state_dict()))
        yield

    monkeypatch.setattr(workers.HybridEngine, "generation", generation)
    workers.round_sampler(3)
    with pytest.raises(KeyError), workers.HybridEngine.generation(SimpleNamespace(source=SimpleNamespace(model=model))):
        raise KeyError
    for row, was in zip(read[0]["0.weight"].tolist(), before["0.weight"].tolist(), strict=True):
        step = max(map(abs, was)) / 3
        assert row == pytest.approx([round(value / step) * step for value in was], rel=0.005)
    assert read[0]["0.weight"].tolist() != before["0.weight"].tolist()
    assert all(torch.equal(read[0][name], before[name]) for name in before if name != "0.weight"), "matrices alone"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "given back"


def kept_lines(gain: float, longer: float, finished: bool = True, more: float = 0.0) -> list[dict[str, object]]:
    """What is kept of SFT, of two runs of a recipe whose answers are better by `gain` and longer by a factor (by `more`
    of it to the prompts for showing), and of two recipes of one run each: one is as long as SFT and the best of all."""
    random, columns = Random(1), ["prompt", "tokens", "finished", "gold", "gold-2", "proxy-2"]

    def line(recipe: str, seed: int, gain: float, longer: float, count: int, more: float = 0.0) -> dict[str, object]:
        found = []
        for prompt in range(60):
            for _ in range(count):
                tokens = random.randrange(40, 160)
                gold = gain + random.gauss(0, 1) + 0.02 * tokens
                length = round(tokens * (longer + more * (prompt % 2)))
                found.append([prompt, length, int(finished), gold, gold, gold])
        return {"recipe": recipe, "seed": seed, "kl": 2.0, "columns": columns, "rows": found}

    runs = [line("good", seed, gain, longer, 4, more) for seed in (1, 2)]
    return [line("sft", 0, 0.0, 1.0, 16), *runs, line("long", 1, 3.0, 2.0, 4), line("once", 1, 3.0, 1.0, 4)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (kept_lines(1.0, 1.0), "Chosen: good. On the half for showing it gains quality by gold and gold-2."),
        (kept_lines(0.0, 1.1), "Chosen: good. On the half for showing it gains nothing by either gold."),
        (kept_lines(1.0, 1.0, more=0.3), "it is not at SFT's length: 0.0% cut, +32.1% tokens."),
        (kept_lines(1.0, 1.3), "No recipe keeps SFT's length"),
        (kept_lines(1.0, 1.0, finished=False), "No recipe keeps SFT's length"),
    ],
)
def test_a_recipe_gains_where_its_interval_at_equal_length_lies_above_a_half_on_unseen_prompts(
    lines, says, monkeypatch
):
    monkeypatch.setattr(quality_report, "RESAMPLES", 80)
    text = quality_report.written(lines)
    assert text.endswith(says + "\n") or says in text.splitlines()[-1]
    assert text == quality_report.written(lines), "the same to the last digit"


def test_a_piece_is_compared_with_the_same_seed_of_what_it_adds_to():
    def line(recipe: str, seed: int, kl: float, tokens: int, finished: str, golds: str) -> dict[str, object]:
        answers = [[n, tokens, int(f), int(g), 5] for n, (f, g) in enumerate(zip(finished, golds, strict=True))]
        return {
            "recipe": recipe, "seed": seed, "kl": kl, "columns": ["prompt", "tokens", "finished", "gold", "gold-2"],
            "rows": answers,
        }  # fmt: skip

    kept = [
        line("other", 1, 0.0, 1, "1", "1"),
        line("base, more", 3, 9.0, 9, "0000", "9999"),  # of a seed that the base has not
        line("base, more", 2, 5.0, 110, "1010", "5252"),
        line("base", 1, 1.0, 100, "1111", "4444"),
        line("base, more", 1, 2.0, 110, "1110", "5552"),
        line("base", 2, 2.0, 100, "1111", "3333"),
        line("base, more, still", 1, 1.0, 100, "1111", "4444"),
    ]
    more, still = quality_report.beside_rows(kept, "base")
    assert more == ["more", "2", "+2.00 +- 1.00", "+37.5 +- 12.5", "+10.0 +- 0.0", "0.625 +- 0.125", "0.500 +- 0.000"]
    assert still == ["more, still", "1", "+0.00 +- nan", "+0.0 +- nan", "+0.0 +- nan", "0.500 +- nan", "0.500 +- nan"]


def write(file: Path, lines: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def make_source(folder: Path) -> None:
    """Files of the names and columns of the real ones, of a few rows each."""
    random, style = Random(0), {"prompt_style": "plain"}
    splits = itertools.cycle(["train"] * 6 + ["test"])
    for name in rows.PAIRS:
        lines = [make_pair(prompt, random) | style | {"split": next(splits)} for prompt in make_prompts(28, random)]
        write(folder / "preference" / f"{name}.jsonl.gz", lines)
    for name in rows.ANSWERS:
        pairs = [make_pair(prompt, random) for prompt in make_prompts(28, random)]
        lines = [{"prompt": x["prompt"], "response": x["chosen"], "split": next(splits)} for x in pairs]
        write(folder / "instruct" / f"{name}.jsonl.gz", lines)
    write(folder / "text" / "c4_demo_en.jsonl.gz", [{"text": "The heron waits by the river. " * 40}] * 20)


def test_rows_with_instructions_are_what_the_box_can_check(tmp_path):
    make_source(tmp_path / "data")
    for folder in ("first", "again"):
        rows.make_instructions(tmp_path / "data", tmp_path / folder)
    files = [tmp_path / "first" / f"instructions_{split}.jsonl" for split in ("train", "test")]
    found = [rows.read_lines(file) for file in files]
    assert [len(part) for part in found] == [4 * 24, 2 * 4], "of 24 and 4 prompts"
    assert all(file.read_bytes() == (tmp_path / "again" / file.name).read_bytes() for file in files)
    lists = [row["instructions"] for part in found for row in part]
    names = [{check["name"] for check in checks} for checks in lists]
    assert set.union(*names) <= set(CHECKS) and len(set.union(*names)) > 7 and set(map(len, names)) == {1, 2}
    assert not any({"all_capitals", "all_lower_case"} <= one or {"json_output", "title"} <= one for one in names)
    scores = instructions(["a"] * len(lists), instructions=lists)  # raises where a check does not take its settings
    assert 0 < sum(filter(None, scores)) < len(lists)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "base"),
    [
        ("quality_smollm2_h200_202611.md", ""),
        ("missing_eos_smollm2_h100_202611.md", ""),
        ("pieces_smollm2_h200_202611.md", f"balanced pairs, {recipes.KEEPS_LENGTH}"),
        ("steps_smollm2_h200_202611.md", f"balanced pairs, {recipes.KEEPS_LENGTH}"),
    ],
)
def test_the_report_of_recipes_is_that_of_the_kept_numbers(page, base):
    file = ROOT / "benchmarks/reports" / page
    kept = quality.read_kept(ROOT / f"benchmarks/raw/{file.stem}.jsonl.bz2")
    lines, page = (text.splitlines() for text in (quality_report.written(kept, base=base), file.read_text()))
    tables, page = [line for line in lines if line.startswith("|")], page + table_lines(TABLES, file.stem)
    assert len(tables) > 20 and [line for line in tables if not any(is_written_as(line, other) for other in page)] == []


NUMBER = r"\d[\d,]*(?:\.\d+)?"


def is_written_as(line: str, other: str) -> bool:
    """Whether two lines are equal but for numbers, by at most one of the last digit that is written.

    Another processor sums in another order, so that it may round a number the other way.
    """
    if line == other or re.sub(NUMBER, "", line) != re.sub(NUMBER, "", other):
        return line == other
    pairs = zip(re.findall(NUMBER, line), re.findall(NUMBER, other), strict=True)
    return all(
        len(one.partition(".")[2]) == len(two.partition(".")[2])
        and abs(Decimal(one.replace(",", "")) - Decimal(two.replace(",", "")))
        <= Decimal(1).scaleb(-len(one.partition(".")[2]))
        for one, two in pairs
    )


def test_numbers_of_a_page_may_differ_by_one_of_their_last_digit():
    line = "| recipe, 3 | 1,024 | 0.719 (0.690 to 0.745) |"
    assert is_written_as(line, line.replace("0.719", "0.720")) and is_written_as(line, line)
    for digits, others in (("0.719", "0.721"), ("0.719", "0.72"), ("1,024", "1,026"), ("recipe", "other")):
        assert not is_written_as(line, line.replace(digits, others)), others


def test_flags_for_the_stages_are_read_with_hyphens_and_with_underscores():
    """A flag given replaces the benchmark's own, which has an underscore in its name."""
    assert pairs_of(["--max-steps", "2"]) == pairs_of(["--max_steps", "2"]) == {"max_steps": "2"}
    assert pairs_of(["--reward-function", "a-b"]) == {"reward_function": "a-b"}


@pytest.mark.slow
def test_the_whole_experiment_on_a_tiny_model(tmp_path, bpe_folder):
    make_source(tmp_path / "data")
    save_tiny("llama", bpe_folder, tmp_path / "base", max_position_embeddings=1024, num_hidden_layers=2)

    def learning(command: str, *words: object) -> None:
        call = [sys.executable, "-m", "benchmarks.learning", command, "--work", str(tmp_path / "work"), "--depths"]
        done = subprocess.run([*call, "2", *map(str, words)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    few = ("--", "--dtype", "fp32")
    given = ("--base", tmp_path / "base", "--data", tmp_path / "data")
    learning("models", *given, *few, "--max-steps", 2)
    models = {file: file.stat().st_mtime for file in (tmp_path / "work" / "models").glob("*/accuracy.json")}
    short = ("--num-samples", 4, "--steps", 2, "--ablation-steps", 1, "--seeds", 1, "--kl-coefs", 0.05)
    short += ("--ablations", "as it is,no missing-EOS penalty")
    small = ("--per-device-generation-batch-size", 4, "--per-device-train-batch-size", 2, "--max-answer-seq-len", 12)
    learning("all", *given, *short, *few, *small)
    assert models == {file: file.stat().st_mtime for file in models}, "what is finished is not made again"
    assert not list((tmp_path / "work").glob("*/*/actor")), "a run's models are not kept"
    report = tmp_path / "report.md"
    learning("report", "--output", report)
    text = report.read_text()
    assert "proxy-2-kl0.05 | 1 |" in text and "nan" not in text
    assert "\n| no missing-EOS penalty | 1 | " in text and text.count("within noise") + text.count("beyond noise") == 1
    assert text.count("- PPO (gold ") == text.count("- SFT (gold ") > 3
    assert not find_spec("matplotlib") or (tmp_path / "report_proxy-2.png").stat().st_size > 5000
    (points,) = quality.read_kept(tmp_path / "report.jsonl.bz2")
    assert (points["run"], points["seed"]) == ("proxy-2-kl0.05", 1) and len(points["points"][0]) == 3
    kept = tmp_path / "kept.jsonl.bz2"
    wanted = ("length out", "dpo, sampled pairs", "grpo, balanced pairs")
    learning(
        "quality", *given, "--seeds", 1, "--quality-steps", 1, "--recipes", *wanted, "--kept", kept, *few, *small[:4]
    )
    learning("quality_report", "--kept", kept, "--output", report)
    assert not find_spec("matplotlib") or report.with_suffix(".png").stat().st_size > 5000
    *runs, sft = sorted(quality.read_kept(kept), key=lambda line: line["recipe"])
    assert [run["recipe"] for run in runs] == sorted(wanted) and sft["recipe"] == "sft"
    assert all(len(sft["rows"]) == 4 * len(run["rows"]) > 0 and abs(run["kl"]) < 1 for run in runs)
    work, (length,) = tmp_path / "work", runs[-1]["reward_function"]
    slope = quality.slope_of(quality_report.answers_of(sft), ("proxy-2",))
    deviation = json.loads((work / "models/proxy-2/config.json").read_text())["score_std"]
    assert length["weight"] == pytest.approx(256 * slope / deviation, rel=1e-2) and "length out" in report.read_text()
    gold, proxy = ((work / "data" / f"{name}.jsonl").read_text().splitlines() for name in ("gold", "proxy"))
    prompts = [{json.loads(line)["prompt"] for line in lines} for lines in (gold, proxy)]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
