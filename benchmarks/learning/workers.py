"""Workers in processes of their own: a model of the first layers, and PPO whose sampler reads rounded weights.

`python -m benchmarks.learning.workers shorten --model FOLDER --depth N --output FOLDER` writes smaller reward models'
start. `python -m benchmarks.learning.workers rounded BITS FLAGS` is `python -m step3_ppo.main FLAGS` with a sampler of
so many bits.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from step3_ppo.main import main as train
from step3_ppo.models.hybrid_engine import HybridEngine


def shorten(words: Sequence[str]) -> int:
    """Keep the first layers, the embedding, the last norm and the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--depth", type=int, required=True)
    given = parser.parse_args(words)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto")
    model.model.layers = model.model.layers[: given.depth]
    model.config.num_hidden_layers = given.depth
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: given.depth]
    model.save_pretrained(given.output)
    AutoTokenizer.from_pretrained(given.model).save_pretrained(given.output)
    return 0


def rounded_rows(matrix: Tensor, bits: int) -> Tensor:
    """Round each row of a matrix (rows, columns) to multiples of its largest value over 2^(bits - 1) - 1."""
    steps = 2 ** (bits - 1) - 1
    scale = (matrix.float().abs().amax(dim=1, keepdim=True) / steps).clamp_min(torch.finfo(torch.float32).tiny)
    return ((matrix.float() / scale).round() * scale).to(matrix.dtype)


def round_sampler(bits: int) -> None:
    """Let every rollout and evaluation of this process read rounded matrices; training has its own back after each."""
    generation = HybridEngine.generation

    @contextmanager
    def of_rounded(self: HybridEngine) -> Iterator[None]:
        matrices = [weight for weight in self.source.model.parameters() if weight.dim() == 2]
        kept = [weight.detach().clone() for weight in matrices]
        try:
            for weight in matrices:
                weight.data.copy_(rounded_rows(weight.data, bits))
            with generation(self):
                yield
        finally:
            for weight, before in zip(matrices, kept, strict=True):
                weight.data.copy_(before)

    HybridEngine.generation = of_rounded  # type: ignore[method-assign]


def rounded(words: Sequence[str]) -> int:
    """Train PPO with a sampler of the bits that the first word says."""
    bits, *flags = words
    round_sampler(int(bits))
    return train(flags)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"shorten": shorten, "rounded": rounded}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
