"""The Triton kernels on a CPU, in triton's interpreter: `python tests/support/kernel_run.py cases.pt found.pt`.

A process of its own where the tests' process has triton for a GPU, which reads TRITON_INTERPRET when it is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from pipeline.kernels.token_kernels import FusedStatistics


def outcome(case: dict) -> dict[str, torch.Tensor | None]:
    """Run the kernels on (M, V) logits, (M,) targets, a factor, a cap and (M,) gradients of both results."""
    logits, factor, cap = case["logits"].clone().requires_grad_(), case["factor"], case["cap"]
    scaling = (1 / cap, cap * factor) if cap else (factor, 0.0)
    log_probs, entropies = FusedStatistics.apply(logits.clone(), case["targets"], scaling, case["with_entropy"])
    results = (log_probs, entropies) if case["with_entropy"] else (log_probs,)
    torch.autograd.backward(results, (case["gradients"], case["entropy_gradients"])[: len(results)])
    return {
        "log_probs": log_probs.detach(),
        "entropies": entropies if entropies is None else entropies.detach(),
        "gradients": logits.grad,
    }


if __name__ == "__main__":
    cases = torch.load(sys.argv[1])
    torch.save({name: outcome(case) for name, case in cases.items()}, sys.argv[2])
