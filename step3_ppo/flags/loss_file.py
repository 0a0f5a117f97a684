"""The user's policy loss, `--policy-loss FILE.py:NAME`: it is loaded in each rank, tried there, and called by names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.errors import InputError, dashed
from pipeline.out_of_memory import is_out_of_memory
from pipeline.rewards.calls import RefusedError, answer_to, loaded_function
from pipeline.tensor_ops import zero_outside
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.mathematics.losses import weighted_sum

TENSORS = ("log_probs", "old_log_probs", "advantages", "response_mask")
SETTINGS = ("policy_clip", "policy_clip_high", "dual_clip", "ratio_cap", "policy_ratio")  # flags, with their values


def load_loss(ppo: PPOCoefficients) -> Callable[..., Tensor] | None:
    """Return the loss of `--policy-loss FILE.py:NAME`, called once for two responses; None: a built-in one.

    It takes TENSORS, each (B, T), and weights as the losses of losses.py have them, and returns the weighted sum over
    the mask. The user's function gets what it names of TENSORS, fp32 and 0 outside the mask, and of SETTINGS. It
    returns (B, T): the loss of each token.

    Raises:
        InputError: a file or function that is wrong, or a flag that the function does not take. Calls raise it, too.
    """
    if (file := ppo.loss_file) is None:
        return None

    def own_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
        with as_input_errors(file.target):
            values = [*zero_outside(mask, new, old, advantages), mask, *(getattr(ppo, name) for name in SETTINGS)]
            given = zip(TENSORS + SETTINGS, values, strict=True)
            losses = function(**{name: value for name, value in given if signature.takes(name)})
            if not getattr(losses, "requires_grad", False) or losses.shape != mask.shape:
                kind = f"{type(losses).__name__} {[*getattr(losses, 'shape', [])]}"
                right = f"a tensor {[*mask.shape]} with a gradient: the loss of each token, no mean"
                raise RefusedError(f"returned {kind}, expected {right}")
        return weighted_sum(losses, mask, weights)

    with as_input_errors(file.target):
        function, signature = loaded_function(file.target, file.digest)
        if unknown := {*signature.needed}.difference(TENSORS, SETTINGS):
            raise RefusedError(f"it needs {min(unknown)!r}; the arguments are {', '.join(TENSORS + SETTINGS)}")
        given = ppo.model_dump(include={*SETTINGS}, exclude_defaults=True)
        if unread := [name for name in given if not signature.takes(name)]:
            raise RefusedError(f"it has no argument {unread[0]}, which {dashed(unread[0])} gives; leave the flag out")
        new = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
        loss = own_loss(new, new.detach() * 1.1, new.detach() + 1.2, new < 0, None)
        if not (loss + torch.autograd.grad(loss, new)[0].sum()).isfinite():
            raise RefusedError(f"of log-probabilities from -2 to -0.5 its loss is {loss:g}, or its gradient not finite")
    return own_loss


@contextmanager
def as_input_errors(target: str) -> Iterator[None]:
    """Raise InputError, one line, for an error of the user's function; not for one of memory, which halves a batch."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise
        answer = answer_to(error, target)
        raise InputError(f"--policy-loss {target}: {answer.get('refused') or answer['failed'][1]}") from error
