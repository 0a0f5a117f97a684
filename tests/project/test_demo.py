"""The demo: its claims on a real run, and exit codes that tell where one fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.source_tree import ROOT

from demo import run, seeds
from demo.report import failed_claims, table

# A run that was sound, as in benchmarks/reports/methods_cpu_202611.md; each of the others breaks one claim.
SOUND = {
    "prompts": 600, "method": "PPO", "minutes": 1.3, "base_rate": 0.0, "base_error": 0.0, "base_distinct": 1.0,
    "sft_rate": 0.48, "sft_error": 0.02, "sft_distinct": 1.0, "ppo_rate": 0.99, "ppo_error": 0.003, "ppo_distinct": 1.0,
    "perplexity_before": 11.3, "perplexity_after": 5.1, "reward_accuracy_before": 0.5, "reward_accuracy": 1.0,
    "reward_start": 2.3, "reward_end": 11.9, "kl_start": 0.0, "kl_end": 1.6, "answers": [],
}  # fmt: skip
BROKEN = {
    "SFT rate in 0.3 .. 0.6": {"sft_rate": 0.25},
    "PPO at least 20 points higher": {"ppo_rate": 0.6},
    "KL under 10 nats": {"kl_end": 10.5},
    "distinct answers at least 0.8 of SFT's": {"ppo_distinct": 0.7},
}


@pytest.mark.parametrize(("claim", "change"), [("", {}), *BROKEN.items()])
def test_a_claim_that_fails_ends_the_demo_with_1(
    claim: str, change: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "run", lambda **options: SOUND | change)
    assert run.main([]) == (1 if claim else 0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f"FAILED: {claim}" if claim else "all claims hold")


def test_a_divergence_that_is_zero_up_to_rounding_has_no_sign() -> None:
    (line,) = [line for line in table(SOUND | {"kl_start": -7e-9}).splitlines() if "KL from" in line]
    assert line.split()[-2:] == ["0.00", "1.60"]


@pytest.mark.parametrize(("claim", "rate"), [("", 0.8), ("DPO at least 20 points higher", 0.6)])
def test_a_method_that_samples_nothing_has_a_margin_and_no_divergence(claim: str, rate: float) -> None:
    """Of DPO's log-ratios on the data none is the divergence that PPO logs."""
    unknown = ("kl_start", "kl_end", "reward_accuracy_before", "reward_accuracy")
    found = {name: value for name, value in SOUND.items() if name not in unknown} | {"method": "DPO", "ppo_rate": rate}
    assert failed_claims(found) == ([claim] if claim else [])
    lines = table(found).splitlines()
    assert [line.split()[-2:] for line in lines if "margin on unseen pairs" in line] == [["2.30", "11.90"]]
    assert not any("KL" in line or "reward" in line for line in lines)


def test_a_method_without_a_reference_has_a_reward_and_no_divergence() -> None:
    unknown = ("kl_start", "kl_end", "reward_accuracy_before", "reward_accuracy")
    found = {name: value for name, value in SOUND.items() if name not in unknown} | {"method": "GRPO"}
    assert failed_claims(found) == []
    lines = table(found).splitlines()
    assert [line.split()[-2:] for line in lines if "GRPO: mean reward" in line] == [["2.30", "11.90"]]
    assert not any("KL" in line or "margin" in line for line in lines)


@pytest.mark.parametrize("bad_seed", [None, 3])
def test_one_seed_that_fails_ends_all_with_1(
    bad_seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(seed: int, overwrite: bool) -> dict[str, Any]:
        return SOUND | (BROKEN["KL under 10 nats"] if seed == bad_seed else {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(seeds, "run", one)
    assert seeds.main() == (1 if bad_seed else 0)
    assert capsys.readouterr().out.count("FAILED: KL under 10 nats") == (2 if bad_seed else 0)
    assert len((tmp_path / "output" / "seeds" / "results.jsonl").read_text().splitlines()) == len(seeds.SEEDS)


@pytest.mark.parametrize("target", ["demo", "demo-tools", "demo-seeds"])
def test_make_ends_as_the_demo_does(target: str) -> None:
    command = ["make", "-C", str(ROOT), "-o", ".venv/installed", target]
    ends = [
        subprocess.run([*command, f"PYTHON={program}"], capture_output=True).returncode for program in ("true", "false")
    ]
    assert ends[0] == 0 and ends[1] != 0


@pytest.mark.slow
def test_the_demo_as_a_user_runs_it(tmp_path: Path) -> None:
    """Data, base model, `train.py --step 1 2 3` with the real launcher, and all claims: two minutes on a quiet core."""
    command = [sys.executable, "-m", "demo.run"]
    done = subprocess.run(command, cwd=tmp_path, env=forks.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all claims hold", done.stderr[-2000:] + done.stdout
    result = json.loads((tmp_path / "output" / "demo" / "result.json").read_text())
    assert result["ppo_rate"] >= result["sft_rate"] + 0.2 and result["reward_accuracy"] > 0.9
    for name in ("sft", "reward", "actor", "critic"):
        assert (tmp_path / "output" / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_demo_by_dpo(tmp_path: Path) -> None:
    """Steps 1 and 3 alone: the pairs that step 2 would have had are stage 3's."""
    command = [sys.executable, "-m", "demo.run", "--method", "dpo"]
    done = subprocess.run(command, cwd=tmp_path, env=forks.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all claims hold", done.stderr[-2000:] + done.stdout
    result = json.loads((tmp_path / "output" / "demo" / "result.json").read_text())
    assert result["method"] == "DPO" and result["ppo_rate"] >= result["sft_rate"] + 0.2
    assert result["reward_end"] > 0.1 > abs(result["reward_start"]) and "kl_end" not in result
    assert sorted(path.name for path in (tmp_path / "output" / "runs").iterdir()) == ["base", "dpo", "sft"]
    assert not (tmp_path / "output" / "reward").exists() and (tmp_path / "output/actor/model.safetensors").is_file()
