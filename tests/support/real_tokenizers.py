"""Published tokenizers as their models use them, from the folders of RLHF_TEST_DATA."""

from pathlib import Path

from tokenizers import processors
from transformers import GPT2TokenizerFast, PreTrainedTokenizerBase


def load_opt_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """OPT's tokenizer: its BOS, put first by encode, is its EOS </s>."""
    tokenizer = GPT2TokenizerFast.from_pretrained(
        folder, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    )
    bos_first = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = bos_first
    return tokenizer
