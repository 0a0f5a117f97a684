"""Log-probabilities and entropies of tokens: torch's against its own softmax in fp64, the Triton kernels against both.

The kernels run in triton's interpreter here, where triton is installed; tests/gpu runs them on a device.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.kernels.token_statistics import LogitScaling, plain_statistics, token_statistics

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# (M, V, temperature, dtype) and a soft cap: one block of columns, several, one that is not whole, one token, none.
SHAPES = {
    "odd": (7, 391, 0.7, torch.float32),
    "one token": (1, 50, 1.0, torch.float32),
    "no token": (0, 50, 1.3, torch.float32),
    "several blocks": (3, 9001, 1.6, torch.float32),
    "whole blocks": (2, 8192, 1.0, torch.float32),
    "two words": (4, 2, 0.3, torch.float32),
    "16 bits": (5, 4999, 0.9, torch.bfloat16),
    "capped": (4, 5001, 0.7, torch.float32, 30.0),
    "capped, 16 bits": (4, 300, 1.0, torch.bfloat16, 50.0),
}


def make_case(shape: str, *, with_entropy: bool = True) -> dict:
    """Logits as far apart as a model's, targets at both ends of the vocabulary, gradients of both signs and one 0."""
    num_tokens, num_columns, temperature, dtype, *cap = SHAPES[shape]
    generator = torch.Generator().manual_seed(num_columns)
    targets = torch.randint(num_columns, (num_tokens,), generator=generator)
    targets[:2] = torch.tensor([0, num_columns - 1])[:num_tokens]
    gradients = torch.randn(num_tokens, generator=generator)
    gradients[2:3] = 0
    entropy_gradients = torch.randn(num_tokens, generator=generator)
    entropy_gradients[3:4] = 0
    logits = 5 * torch.randn(num_tokens, num_columns, generator=generator) - 40
    return {
        "logits": logits.to(dtype), "targets": targets, "gradients": gradients, "factor": 1 / temperature,
        "entropy_gradients": entropy_gradients, "with_entropy": with_entropy, "cap": cap[0] if cap else None,
    }  # fmt: skip


def exact(case: dict) -> dict[str, torch.Tensor]:
    """The same by torch.distributions in fp64."""
    logits = case["logits"].double().requires_grad_()
    capped = torch.tanh(logits / case["cap"]) * case["cap"] if case["cap"] else logits
    distribution = torch.distributions.Categorical(logits=capped * case["factor"], validate_args=False)
    log_probs = distribution.log_prob(case["targets"])
    entropies = distribution.entropy()
    ((log_probs * case["gradients"]).sum() + (entropies * case["entropy_gradients"]).sum()).backward()
    return {"log_probs": log_probs.detach(), "entropies": entropies.detach(), "gradients": logits.grad}


def special_cases() -> dict[str, dict]:
    """Tokens that are impossible, a number that is not finite, and no entropy."""
    impossible, broken = make_case("odd"), make_case("odd")
    impossible["logits"][:, 5:300] = -math.inf
    impossible["targets"][:] = 3
    broken["logits"][2, 17] = math.nan
    return {"impossible": impossible, "broken": broken, "no entropy": make_case("odd", with_entropy=False)}


CASES = {name: make_case(name) for name in SHAPES} | special_cases()


@pytest.fixture(scope="module")
def by_kernels(tmp_path_factory) -> dict[str, dict]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":  # chosen for this process already (support/kernel_mode.py)
        from support import kernel_run

        return {name: kernel_run.outcome(case) for name, case in CASES.items()}
    folder = tmp_path_factory.mktemp("kernels")
    torch.save(CASES, folder / "cases.pt")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "tests/support/kernel_run.py", str(folder / "cases.pt"), str(folder / "found.pt")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


def by_torch(case: dict) -> dict[str, torch.Tensor | None]:
    logits = case["logits"].clone().requires_grad_()
    scaling = LogitScaling(1 / case["factor"], cap=case["cap"])
    log_probs, entropies = token_statistics(logits, case["targets"], scaling, with_entropy=case["with_entropy"])
    loss = (log_probs * case["gradients"]).sum()
    if entropies is not None:
        loss = loss + (entropies * case["entropy_gradients"]).sum()
        entropies = entropies.detach()
    loss.backward()
    return {"log_probs": log_probs.detach(), "entropies": entropies, "gradients": logits.grad}


def assert_close(actual: dict, case: dict) -> None:
    expected = exact(case)
    assert actual["log_probs"].dtype == actual["entropies"].dtype == torch.float32
    assert actual["gradients"].dtype == case["logits"].dtype
    for name in ("log_probs", "entropies"):
        torch.testing.assert_close(actual[name].double(), expected[name], **TOLERANCE)
    rounding = {"rtol": 1e-2, "atol": 1e-5} if case["logits"].dtype == torch.bfloat16 else TOLERANCE
    torch.testing.assert_close(actual["gradients"].double(), expected["gradients"], **rounding)


@pytest.mark.parametrize("name", SHAPES)
def test_torch_equals_fp64(name):
    assert_close(by_torch(CASES[name]), CASES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_fp64(by_kernels, name):
    assert_close(by_kernels[name], CASES[name])


def test_tokens_that_are_impossible_add_nothing(by_kernels):
    case = CASES["impossible"]
    kept = [*range(5), *range(300, case["logits"].shape[1])]
    expected = exact(case | {"logits": case["logits"][:, kept]})
    for actual in (by_torch(case), by_kernels["impossible"]):
        torch.testing.assert_close(actual["log_probs"].double(), expected["log_probs"], **TOLERANCE)
        torch.testing.assert_close(actual["entropies"].double(), expected["entropies"], **TOLERANCE)
        torch.testing.assert_close(actual["gradients"][:, kept].double(), expected["gradients"], **TOLERANCE)
        assert (actual["gradients"][:, 5:300] == 0).all()


def test_a_number_that_is_not_finite_spoils_its_own_token_alone(by_kernels):
    for actual in (by_torch(CASES["broken"]), by_kernels["broken"]):
        assert actual["log_probs"].isfinite().tolist() == [True, True, False, True, True, True, True]


def test_no_entropy_unless_asked_for(by_kernels):
    for actual in (by_torch(CASES["no entropy"]), by_kernels["no entropy"]):
        assert actual["entropies"] is None
        torch.testing.assert_close(actual["log_probs"], by_kernels["odd"]["log_probs"])


def test_scale_and_cap_come_before_the_temperature():
    case = make_case("odd")
    logits = case["logits"] + 40
    actual, _ = plain_statistics(logits, case["targets"], LogitScaling(0.7, scale=0.3, cap=2.0), with_entropy=False)
    expected = (torch.tanh(logits.double() * 0.3 / 2) * 2 / 0.7).log_softmax(-1)
    expected = expected.gather(1, case["targets"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE)


@pytest.mark.slow
def test_a_cpu_needs_no_triton():
    code = "import sys, torch\nfrom pipeline.models.forward.causal_lm import token_statistics\n"
    code += "from pipeline.kernels.token_statistics import *\n"
    code += "token_statistics(torch.zeros(2, 3), torch.zeros(2).long(), LogitScaling(), with_entropy=True)\n"
    code += "print('pipeline.kernels.token_kernels' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
