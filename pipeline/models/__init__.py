"""Loading, checking and running transformers models: heads, LoRA, tokenizers, packed attention."""
