"""PPO on quantised bases on a CUDA device: adapters are sampled unmerged in CUDA graphs, as the trainer computes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.cuda_stage import log_of, run_stage
from support.messages import naming
from support.tiny_run import make_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NF4 = pytest.param(
    "nf4", marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
)


@pytest.mark.parametrize("kind", ["int8", NF4])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1)])
def test_ppo_samples_from_the_quantised_weights_that_it_trains_on(
    kind: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path)
    flags = {"quantization": kind, "lora_dim": 4, "lora_learning_rate": 1e-2, "gradient_checkpointing": "true"}
    both = {f"{model}_{name}": value for model in ("actor", "critic") for name, value in flags.items()}
    first, second = run_stage("ppo", folder, "out", dtype=dtype, **both)
    log = log_of("ppo", folder, "out")
    assert (naming("fell back from fused ... nf4") in log.splitlines()) == (kind == "nf4")
    assert f"generation: {'static' if kind == 'nf4' else 'fused'} backend" in log
    assert first["policy/sampler_error"] < tolerance and first["policy/first_ratio_error"] == 0.0
    assert first["objective/kl"] == pytest.approx(0.0, abs=tolerance) and second["policy/approx_kl"] > 0
