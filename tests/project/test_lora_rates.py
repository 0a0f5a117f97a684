"""`python -m benchmarks.lora_rates`: the runs of a grid with a tiny model, and what is not made again."""

import json
import subprocess
import sys

import pytest
from support.source_tree import ROOT
from support.tiny_models import save_tiny

from benchmarks.learning.rows import read_lines, write
from benchmarks.lora_rates import DATA, settings


def test_the_grid():
    names = [setting.name for setting in settings(["grpo", "ppo"], 2)]
    rates = ("1e-05-a16", "3e-05-a16", "0.0001-a16", "0.0005-a16", "0.00025-a32", "1e-05-a0")
    assert names[:6] == [f"grpo-{rate}-s1" for rate in rates]
    assert names[6:9] == ["ppo-0.0001-a16-s1", "ppo-0.0005-a16-s1", "ppo-1e-05-a0-s1"]
    assert names[9:] == [name.replace("-s1", "-s2") for name in names[:9]]


@pytest.mark.slow
def test_runs_of_a_tiny_model(tmp_path, bpe_folder):
    """Rows of the test's own stand where the real ones would be made; runs that have a line are not made again."""
    save_tiny("llama", bpe_folder, tmp_path / "base", max_position_embeddings=1024, num_hidden_layers=1)
    (tmp_path / "work" / "data").mkdir(parents=True)
    checks = [{"name": "number_of_words", "at_most": 9}]
    for number, name in enumerate({name for names in DATA.values() for name in names}):
        rows = [{"prompt": f"Add {n} and {number}.", "instructions": checks} for n in range(16)]
        answers = ["It is 1.", "It is 12 now."]  # each is the longer one of half of the pairs
        pairs = [row | {"chosen": answers[n % 2], "rejected": answers[1 - n % 2]} for n, row in enumerate(4 * rows)]
        write(tmp_path / "work" / "data" / f"{name}.jsonl", rows if "instructions" in name else pairs)
    wanted = {
        "grpo-0.00025-a32-s1": {"actor_lora_dim": 32, "actor_lora_alpha": 32.0, "actor_lora_learning_rate": 2.5e-4},
        "ppo-1e-05-a0-s1": {"actor_lora_dim": 0, "actor_learning_rate": 1e-5},
        "dpo-0.0005-a16-s1": {"lora_dim": 32, "lora_alpha": 16.0, "lora_learning_rate": 5e-4},
    }
    names = [setting.name for setting in settings(["grpo", "ppo", "dpo"], 1)]
    file, short = tmp_path / "rates.jsonl", {"ppo.max_steps": 1, "ppo.train_batch_size": 16, "dpo.max_steps": 1}
    write(file, [{"name": name} for name in names if name not in wanted])
    call = [sys.executable, "-m", "benchmarks.lora_rates", "--base", str(tmp_path / "base"), "--data", str(tmp_path)]
    call += ["--work", str(tmp_path / "work"), "--json", str(file), "--seeds", "1"]
    call += ["--more", json.dumps(short | {"ppo.max_answer_seq_len": 4, "dtype": "fp32"})]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row["evals"] for row in read_lines(file) if "evals" in row}
    assert set(found) == set(wanted)
    assert {(one[0]["step"], one[-1]["step"], one[0]["eval_rows"]) for one in found.values()} == {(0, 1, 64.0)}
    for name, flags in wanted.items():
        config = next((tmp_path / "work" / "runs" / name / "runs").glob("*/config.json"))
        values = {flag: entry["value"] for flag, entry in json.loads(config.read_text(encoding="utf-8")).items()}
        assert {flag: values[flag] for flag in flags} == flags
