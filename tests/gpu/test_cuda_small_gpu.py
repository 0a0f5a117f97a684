"""The recipe of docs/guides/lora_24gb.md: PPO on a quantised 7B, by step 3's own command, under a cap of 24 GiB."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiny_run import read_metrics

from benchmarks.speed.jobs import environment, flags, last_json, launched, output_words

pytestmark = pytest.mark.gpu
CAP_GIB, ROWS, TOKENS, TIMEOUT_S = 24, 16, 512, 540
SHAPES = {"actor": "llama-7b", "critic": "350m"}
NF4 = pytest.param(
    "nf4", marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
)


def run(module: str, words: Sequence[object]) -> str:
    """Run a module of benchmarks/speed with all CPU cores; return its stdout."""
    variables = environment() | {"OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        launched(module, words, gpus=1), env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor of 13.5 GB, a critic, and prompts that are longer than they may be, so that all of them are cut."""
    folder = tmp_path_factory.mktemp("small-gpu")
    run(
        "benchmarks.speed.random_models",
        flags(SHAPES | {"output": folder, "prompts": 3 * ROWS, "prompt_words": 2 * TOKENS}),
    )
    return folder


def recipe(models: Path, kind: str) -> dict[str, Any]:
    """Flags of step 3: 16 rows of 512 + 512 tokens, one base for actor and reference, one for critic and reward."""
    shared = {"gradient_checkpointing": "true", "lora_dim": 16, "quantization": kind}
    words = {f"{role}_{name}": value for role in ("actor", "critic") for name, value in shared.items()}
    words |= {f"{role}_model_name_or_path": models / role for role in ("actor", "critic")}
    words |= {"data_path": models / "prompts.jsonl", "data_split": "none", "eval_fraction": 0, "max_steps": 2}
    words |= {"data_output_path": models / "cache", "long_prompts": "truncate_left", "dtype": "bf16"}
    words |= {"max_prompt_seq_len": TOKENS, "max_answer_seq_len": TOKENS, "release_inference_cache": "true"}
    words |= {"old_log_probs": "trainer"}
    return words | {
        "per_device_generation_batch_size": ROWS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", NF4])
def test_a_7b_is_trained_by_ppo_within_24_gib(kind: str, models: Path, tmp_path: Path) -> None:
    words = ["--cap-gib", CAP_GIB, "--", *flags(recipe(models, kind)), *output_words(tmp_path)]
    found = json.loads(last_json(run("benchmarks.speed.watched", words)))
    lines = [line for line in read_metrics(tmp_path / "run") if "step_s" in line]
    seconds = [line["step_s"] for line in lines]
    backend = re.findall(r"generation: (\w+) backend", (tmp_path / "run" / "log.txt").read_text())
    print(f"\n{kind}: {found}, {backend}, seconds of the steps {seconds}", file=sys.stderr)
    assert backend == ["static" if kind == "nf4" else "fused"]
    assert [line["step"] for line in lines] == [1, 2] and found["peak_gib"] <= found["reserved_gib"] <= CAP_GIB
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert all(line["completions/mean_length"] > 0.9 * TOKENS and line["actor/grad_norm"] > 0 for line in lines)
    # The largest difference of a token's log-probability: 0.38 in 16 bits for a random Llama of 8B.
    assert lines[0]["policy/sampler_error"] < 0.6 and lines[0]["policy/first_ratio_error"] == 0
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-3) and lines[1]["objective/kl"] != 0
    for role in ("actor", "critic"):
        assert [file.name for file in (tmp_path / "model" / role).glob("*.safetensors")] == [
            "adapter_model.safetensors"
        ]
