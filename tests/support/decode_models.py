"""Tiny models of every architecture that fast generation supports, and helpers to run them; all on DEVICE.

On a CPU the Triton kernels run in triton's interpreter (tests/conftest.py), some hundredths of a second a token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.families import FAMILIES, family_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from pipeline.generation import scheduler
from pipeline.generation.backends import CachedForward
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import generate
from pipeline.generation.forwards.fused import FusedForward
from pipeline.generation.forwards.fused_weights import DecodeWeights
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling, Vocabulary
from pipeline.models.decoders.families import read_architecture
from pipeline.models.lora import add_lora, quantise_to_int8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# triton's interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits as whole numbers.
SIXTEEN_BITS = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
NUM_TOKENS, PAD, EOS = 301, 1, 2
POSITIONS = 64
EXPERTS = ("qwen3-moe", "olmoe")
NOT_STATIC = ("bloom", "phi-4-mini")  # attention biases by distance; longrope
KEY = RandomKey(3, "rollout")
COMMON = {
    "vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": PAD, "bos_token_id": EOS,
    "eos_token_id": EOS, "max_position_embeddings": POSITIONS,
}  # fmt: skip
LLAMA = COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40}
LINEAR_ROTARY = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16}


def opt(**changes: Any) -> nn.Module:
    settings = {"num_attention_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
    return random_weights(OPTForCausalLM(OPTConfig(**(COMMON | settings | changes))))


def llama(**changes: Any) -> nn.Module:
    return random_weights(LlamaForCausalLM(LlamaConfig(**(LLAMA | {"tie_word_embeddings": False} | changes))))


def opt_350m() -> nn.Module:
    return opt(do_layer_norm_before=False, word_embed_proj_dim=16)


def gpt_neox(**changes: Any) -> nn.Module:
    settings = COMMON | {"num_attention_heads": 2, "intermediate_size": 48} | changes
    return random_weights(GPTNeoXForCausalLM(GPTNeoXConfig(**settings)))


def cohere() -> nn.Module:
    return random_weights(CohereForCausalLM(CohereConfig(**COMMON, num_attention_heads=2, intermediate_size=40)))


def family(name: str, **changes: Any) -> nn.Module:
    config = family_config(name, NUM_TOKENS, **changes)
    # Older versions of transformers give Gemma 2 to sdpa, which leaves its soft caps out.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    return random_weights(AutoModelForCausalLM.from_config(config, **capped))


# Head size 20 and 3 query heads to a key head: no powers of two.
FUSED: dict[str, Callable[[], nn.Module]] = {
    "opt": opt,
    "opt untied": lambda: opt(tie_word_embeddings=False),
    "opt-350m": opt_350m,
    "opt of head size 20": lambda: opt(hidden_size=40, word_embed_proj_dim=40),
    "opt without biases": lambda: opt(enable_bias=False, layer_norm_elementwise_affine=False),
    "opt without a last norm": lambda: opt(_remove_final_layer_norm=True),
    "llama": llama,
    "llama, own keys, tied": lambda: llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama of head size 20": lambda: llama(hidden_size=60, num_attention_heads=3, num_key_value_heads=1),
    "llama with linear rotary": lambda: llama(rope_parameters=LINEAR_ROTARY),
    "llama with yarn": lambda: llama(rope_parameters=YARN),
    "gpt-neox, in sequence": lambda: gpt_neox(use_parallel_residual=False),
    "gpt-neox without biases": lambda: gpt_neox(attention_bias=False),
    **{name: partial(family, name) for name in FAMILIES if name not in ("llama-2", "opt", "bloom", *EXPERTS)},
}
STATIC: dict[str, Callable[[], nn.Module]] = {
    "opt-350m": opt_350m,
    "cohere": cohere,
    **{name: partial(family, name) for name in FAMILIES if name not in NOT_STATIC},
}


@torch.no_grad()
def random_weights(model: Any, seed: int = 0) -> Any:
    """Every parameter random, norms and biases included, so that a term that is lost or stale shows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model.eval().to(DEVICE)


@torch.no_grad()
def shaken(parameter: torch.Tensor, seed: int = 5) -> None:
    """Every number changes."""
    generator = torch.Generator().manual_seed(seed)
    parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))


def shaken_all(parameters: Sequence[torch.Tensor]) -> None:
    for seed, parameter in enumerate(parameters):
        shaken(parameter, seed)


def with_lora(model: Any, *, only_lora: bool = True, int8: bool = False, **settings: Any) -> Any:
    """All A and B random, on an int8 base if asked."""
    given = {"dim": 3, "alpha": 12, "dropout": 0.0, "module_name": "all-linear"} | settings
    if int8:
        quantise_to_int8(model)
    wrapped = add_lora(model, only_lora=only_lora, task="CAUSAL_LM", seed=1, **given).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            shaken(parameter)
    return wrapped


def fused(model: Any) -> FusedForward:
    weights = DecodeWeights(read_architecture(model))
    weights.refresh()
    return FusedForward(weights)


FUNCTIONS: dict[str, Callable[[Any], CachedForward]] = {"fused": fused, "static": StaticCacheForward}


def random_ids(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist() for length in lengths]


def random_prompts(lengths: Sequence[int], seed: int = 1) -> list[Prompt]:
    return [Prompt(ids, 100 + n) for n, ids in enumerate(random_ids(lengths, seed))]


@torch.no_grad()
def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """(S, V) by the model's own forward pass over one row."""
    return model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0].float()


def rollouts(
    model: Any, function: CachedForward | Generator, prompts: Sequence[Prompt], *, sampling: Sampling,
    num_samples: int = 1, num_slots: int = 3, ends: Sequence[int] = (EOS,), key: RandomKey = KEY,
) -> tuple[Rollout, Rollout]:  # fmt: skip
    """(by a fast path, by the eager loop) with the same random numbers."""
    fast = function if isinstance(function, Generator) else generator_of(function, ends)
    common: dict[str, Any] = {"num_samples": num_samples, "sampling": sampling, "key": key}
    return generate(fast, prompts, num_slots=num_slots, **common), eagerly(model, prompts, ends=ends, **common)


def eagerly(
    model: nn.Module, prompts: Sequence[Prompt], *, ends: Sequence[int] = (EOS,), pad_id: int = PAD,
    num_tokens: int | None = None, num_slots: int = 1000, **request: Any,
) -> Rollout:  # fmt: skip
    """A rollout by the eager backend, in one batch."""
    vocabulary = Vocabulary(frozenset(ends), pad_id, num_tokens)
    return generate(EagerGenerator(model, vocabulary), prompts, num_slots=num_slots, **request)


def generator_of(function: CachedForward, ends: Sequence[int] = (EOS,)) -> Generator:
    return Generator(function, Vocabulary(frozenset(ends), PAD))


def assert_same(mine: Rollout, theirs: Rollout, *, tolerance: float = 1e-5) -> None:
    """Equal tokens and ends; log-probabilities up to rounding."""
    assert [row.tolist() for row in mine.responses] == [row.tolist() for row in theirs.responses]
    assert [row.tolist() for row in mine.prompts] == [row.tolist() for row in theirs.prompts]
    assert mine.finished.tolist() == theirs.finished.tolist()
    for ours, expected in zip(mine.log_probs, theirs.log_probs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=tolerance)


def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll finished slots often: in the interpreter a decode step costs more than a poll."""
    monkeypatch.setattr(scheduler, "POLL_INTERVAL", 2)
    monkeypatch.setattr(scheduler, "POLL_INTERVAL_WHILE_WAITING", 1)
