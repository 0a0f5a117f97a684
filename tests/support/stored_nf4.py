"""Folders whose weights are stored in 4 bits, as transformers and bitsandbytes write them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def store_nf4(
    source: Path | str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    auto_class: Any = AutoModelForCausalLM,
    **entry: Any,
) -> str:
    """Quantise the model at `source` while loading it in `dtype`, and save it; `entry` are bitsandbytes' options."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | entry
    config = BitsAndBytesConfig(load_in_4bit=True, **options)
    model = auto_class.from_pretrained(source, dtype=dtype, quantization_config=config)
    model.train().save_pretrained(folder)
    return str(folder)
