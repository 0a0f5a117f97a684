"""Loading, checking and running transformers models: heads, LoRA, tokenizers, forward passes."""
