"""EleutherAI's lm_eval over HTTP gives what its own transformers backend gives, on two tasks of local files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install 'lm_eval[api]')")

WORDS = ["hello", "what", "is", "this", "there", "a", "b", "one two", "the end", "why not"]
SHARED = {"dataset_path": "json", "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}"}
TASKS = {
    "choices": SHARED
    | {
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "continuations": SHARED
    | {
        "output_type": "generate_until",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def results(folder: Path, name: str, *words: str) -> dict[str, list]:
    """Task -> what was computed of each row: choices' log-probabilities, or texts."""
    out = folder / name
    command = [sys.executable, "-m", "lm_eval", "run", *words, "--tasks", *TASKS, "--include_path", str(folder)]
    command += ["--output_path", str(out), "--log_samples"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in TASKS:
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        found[task] = [row["filtered_resps"] for row in rows]
    return found


@pytest.mark.slow
def test_lm_eval_over_http_agrees_with_its_transformers_backend(served, models, tmp_path):
    rows = [
        {"question": f"{WORDS[n % 10]} {WORDS[n * 3 % 10]}", "choices": [f" {WORDS[(n + k) % 10]}" for k in (1, 2, 4)]}
        for n in range(12)
    ]
    text = "".join(json.dumps(row | {"label": n % 3}) + "\n" for n, row in enumerate(rows))
    (tmp_path / "rows.jsonl").write_text(text)
    for task, content in TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
        (tmp_path / f"{task}.yaml").write_text(json.dumps({"task": task} | content | files))  # JSON is YAML
    model = str(models / "random")
    own = results(
        tmp_path, "own", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"
    )
    arguments = f"model=random,base_url={served.url}/v1/completions,tokenizer={model},num_concurrent=2,max_length=512"
    os.environ["OPENAI_API_KEY"] = served.token
    try:
        http = results(tmp_path, "http", "--model", "local-completions", "--model_args", arguments)
    finally:
        del os.environ["OPENAI_API_KEY"]
    assert http["continuations"] == own["continuations"] and any(any(texts) for texts in own["continuations"])
    for mine, theirs in zip(http["choices"], own["choices"], strict=True):
        numbers = [[float(value) for value, _ in each] for each in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
