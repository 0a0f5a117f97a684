"""Two CUDA devices: ranks that talk by NCCL train as one does, and share or stream the weights of rollouts."""

from pathlib import Path

import pytest
import torch
from support.cuda_stage import furthest, log_of, run_stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LOSSES = {
    "sft": ("loss", "grad_norm"),
    "reward": ("loss", "grad_norm"),
    "ppo": ("loss/policy", "loss/value", "objective/kl", "objective/scores", "actor/grad_norm", "critic/grad_norm"),
}
FP32_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, list[dict]]:
    return {stage: run_stage(stage, folder, f"{stage}-1") for stage in LOSSES}


def zero(stage: str, number: int) -> dict[str, int]:
    names = ("actor_zero_stage", "critic_zero_stage") if stage == "ppo" else ("zero_stage",)
    return dict.fromkeys(names, number)


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("stage", list(LOSSES))
def test_two_ranks_train_as_one(folder, single, stage, number):
    lines = run_stage(stage, folder, f"{stage}-2-{number}", ranks=2, **zero(stage, number))
    assert furthest(lines, single[stage], *LOSSES[stage]) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("flags", "logged"),
    [
        ({"inference_tp_size": 2}, "tensor parallel, over 2 ranks"),
        ({"inference_tp_size": 2, **zero("ppo", 3)}, "tensor parallel, over 2 ranks"),
        ({"rollout_weights": "streamed", **zero("ppo", 3)}, "weights are streamed"),
    ],
    ids=["tensor parallel", "tensor parallel at ZeRO stage 3", "streamed"],
)
def test_rollouts_of_shared_weights_are_those_of_one_gpu(folder, single, flags, logged, request):
    output = request.node.callspec.id.replace(" ", "-")
    lines = run_stage("ppo", folder, output, ranks=2, **flags)
    assert furthest(lines, single["ppo"], *LOSSES["ppo"]) < FP32_TOLERANCE
    assert logged in log_of("ppo", folder, output)
