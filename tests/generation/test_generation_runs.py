"""Step 3 with each backend, in this process: the backend changes how fast responses come, and no number."""

import math
from pathlib import Path
from typing import Any

import pytest
from support.decode_models import poll_often
from support.in_process import error_lines, leave_group
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics, write_lines

from step3_ppo.models.hybrid_engine import HybridEngine

FOLDER_SIZES = {"num_train": 8, "num_test": 2}
TOLERANCE = 1e-4
LORA = {"actor_lora_dim": 2, "actor_lora_module_name": "q_proj", "actor_learning_rate": 1e-2}


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """Short prompts: in the interpreter each of their tokens counts."""
    leave_group()  # DeepSpeed keeps that of an earlier file
    rows = [{"prompt": f"{n}?", "chosen": "It was calm.", "rejected": "It was bitter."} for n in range(9)]
    write_lines(folder / "train.jsonl", rows[:8])
    write_lines(folder / "one.jsonl", rows[8:])
    return folder


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[HybridEngine]:
    """The hybrid engines that runs make from now on."""
    made: list[HybridEngine] = []
    first = HybridEngine.__init__

    def watched(self: HybridEngine, *given: Any, **more: Any) -> None:
        made.append(self)
        first(self, *given, **more)

    monkeypatch.setattr(HybridEngine, "__init__", watched)
    poll_often(monkeypatch)
    return made


def run(folder: Path, out: Path, **changes: object) -> int:
    """Two rollouts of two prompts with an update on each."""
    flags = {
        "critic_model_name_or_path": folder / "scorer", "eval_data_path": folder / "one.jsonl",
        "max_prompt_seq_len": 32, "max_answer_seq_len": 5, "critic_learning_rate": 1e-3, "lr_scheduler_type": None,
        "per_device_generation_batch_size": 2, "per_device_train_batch_size": 2, "max_steps": 2,
    }  # fmt: skip
    return run_ppo(ppo_words(folder, out, **flags | changes))


def lines(out: Path) -> list[dict[str, float]]:
    (file,) = out.rglob("metrics.jsonl")
    return read_metrics(file.parent)


def assert_same_metrics(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    seen = set()
    for ours, expected in zip(mine, theirs, strict=True):
        for name, value in expected.items():
            if name.startswith(("objective/", "eval_objective/", "loss/", "reward", "policy/", "value/")):
                seen.add(name)
                assert math.isclose(ours[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), name
        for prefix in ("", "eval_"):
            assert abs(ours.get(f"{prefix}policy/sampler_error", 0.0)) < TOLERANCE
        assert ours.get("policy/first_ratio_error", 0.0) == 0.0
    assert {"objective/kl", "objective/scores", "policy/sampler_error", "policy/first_ratio_error"} <= seen


@pytest.fixture(scope="module")
def eager(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Metrics of the eager backend, without and with adapters."""
    actual = {}
    for name, settings in (("plain", {}), ("lora", LORA)):
        out = tmp_path_factory.mktemp(f"eager-{name}")
        assert run(folder, out / "model", generation_engine="eager", **settings) == 0
        actual[name] = lines(out)
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fused", "static"])
def test_a_run_with_another_backend_has_the_same_numbers(backend, folder, tmp_path, eager, engines):
    assert run(folder, tmp_path / "model", generation_engine=backend) == 0
    assert_same_metrics(lines(tmp_path), eager["plain"])
    (hybrid,) = engines
    assert hybrid.backend == backend and hybrid._generator._buffers is not None
    (log,) = tmp_path.rglob("log.txt")
    assert f"generation: {backend} backend" in log.read_text()


@pytest.mark.slow
def test_the_inference_cache_is_released(folder, tmp_path, eager, engines):
    flags = {"generation_engine": "static", "release_inference_cache": "true"}
    assert run(folder, tmp_path / "model", **flags) == 0
    assert_same_metrics(lines(tmp_path), eager["plain"])
    assert engines[0].backend == "static" and engines[0]._generator is None


@pytest.mark.slow
def test_unmerged_adapters(folder, tmp_path, eager, engines):
    """The backend that knows them is the model's own forward pass."""
    flags = {"generation_engine": "static", "merge_lora_for_generation": "false", **LORA}
    assert run(folder, tmp_path / "model", **flags) == 0
    assert engines[0].backend == "static"
    assert_same_metrics(lines(tmp_path), eager["lora"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fused", "static"])
def test_a_quantised_base_is_sampled_as_it_is_trained(backend, folder, tmp_path, engines):
    """The same codes are dequantised alike, for the sampler, the trainer and the reference policy."""
    assert run(folder, tmp_path / "model", generation_engine=backend, actor_quantization="int8", **LORA) == 0
    assert engines[0].backend == backend
    first, second = (line for line in lines(tmp_path) if "policy/sampler_error" in line)
    assert max(first["policy/sampler_error"], second["policy/sampler_error"]) < 1e-5
    assert first["policy/first_ratio_error"] == 0.0 and first["objective/kl"] == 0.0 != second["objective/kl"]


REFUSED = {
    "quantised weights": (
        {"generation_engine": "fused", "actor_quantization": "nf4", **LORA},
        "--generation-engine fused ... 4-bit weights",
    ),
    "unmerged adapters": (
        {"generation_engine": "fused", "merge_lora_for_generation": "false", **LORA},
        "--generation-engine fused ... unmerged adapters",
    ),
    "ranks that are not there": (
        {"generation_engine": "fused", "inference_tp_size": 2},
        "--inference-tp-size 2 ... 1 rank",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused(name, folder, tmp_path, capfd):
    flags, complaint = REFUSED[name]
    assert run(folder, tmp_path / "model", **flags) == 2
    actual = error_lines(capfd.readouterr().err)
    assert len(actual) == 1 and actual[0] == naming(f"error: {complaint}"), actual
