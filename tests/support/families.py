"""The smallest configurations of every family of models, with what makes each family different from Llama's shape.

Two layers of width 32 and two heads of size 16. Windows and original lengths are short: a test's rows pass them.
"""

from pathlib import Path
from typing import Any

from support.tiny_models import randomise
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

WINDOW = 3
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
GATED = {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}
GEMMA = GATED | {"query_pre_attn_scalar": 24, "sliding_window": WINDOW, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 4.0, 8.0]}
# No test's sampler passes the original length.
LONGROPE = {"rope_parameters": PARTIAL | FACTORS | {"rope_type": "longrope"}, "original_max_position_embeddings": 96}
EXPERTS = GATED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Name: (model type, fields of its configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", GATED | {"num_key_value_heads": 2}),
    "llama-3": ("llama", GATED | {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", GATED | {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", GATED),
    "qwen3": ("qwen3", GATED | {"head_dim": 24}),
    "gemma": ("gemma", GATED | {"tie_word_embeddings": True}),
    "gemma-2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma-3": ("gemma3_text", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi-3": ("phi3", GATED | {"sliding_window": None}),
    "phi-4-mini": ("phi3", GATED | LONGROPE | {"sliding_window": None, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", GATED | {"no_rope_layers": [1, 0]}),
    "gpt2": ("gpt2", {}),
    "pythia": ("gpt_neox", {"intermediate_size": 48, "rope_parameters": PARTIAL}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "olmo-2": ("olmo2", GATED),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "olmoe": ("olmoe", EXPERTS | {"intermediate_size": 24}),
}
# Families that are not among MODEL_TYPES. The head of modernbert has a layer and a norm in front; jamba and lfm2 have
# layers with a recurrent state or a convolution beside attention, minimax a cache class of its own; mamba and rwkv
# cache states only.
STATES = {"mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
UNTESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", GATED), "modernbert": ("modernbert-decoder", {"intermediate_size": 48}),
    "jamba": ("jamba", GATED | STATES | {"num_experts": 2}), "lfm2": ("lfm2", GATED | {"full_attn_idxs": [1]}),
    "minimax": ("minimax", GATED | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "mamba": ("mamba", {"state_size": 4}), "rwkv": ("rwkv", {"attention_hidden_size": 32, "context_length": 64}),
}  # fmt: skip


def family_config(name: str, vocab_size: int, **changes: Any) -> PretrainedConfig:
    """Return the configuration of one of FAMILIES."""
    kind, fields = (FAMILIES | UNTESTED)[name]
    return AutoConfig.for_model(kind, vocab_size=vocab_size, **(SHAPE | fields | changes))


def save_family(name: str, folder: Path) -> None:
    """Replace the model of `folder` by a tiny one of another family; the tokenizer stays."""
    config = family_config(name, len(AutoTokenizer.from_pretrained(folder)))
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, 0)
    model.save_pretrained(folder)
