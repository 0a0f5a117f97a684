"""Load a tokenizer, choose its padding token and find every token that ends a text.

The vocabulary never changes. Chat templates are in `data/templates.py`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.data.templates import end_token_ids, set_template
from pipeline.errors import InputError
from pipeline.hub import go_offline_without_network
from pipeline.models.loading import check_model, check_vocabulary, is_encoder_decoder
from pipeline.models.paths import may_be_hub_id, nearest_folder, read_adapter_config, read_config, reading_error
from pipeline.models.weight_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Names of reserved tokens in published vocabularies, which no text contains, best first.
RESERVED_NAMES = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<PAD>",
    "<|finetune_right_pad_id|>",
    "<|vision_pad|>",
    "<unused0>",
    "<|reserved_special_token_0|>",
    "<|endoftext|>",
)


@dataclass(frozen=True, slots=True)
class PaddingToken:
    """A padding token: its id, its text and its source. 'eos' means that no other token can be used for padding."""

    pad_id: int
    token: str
    source: Literal["tokenizer", "reserved", "unk", "eos"]


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a local folder or hub id. Raises InputError or EnvironmentFault with one line."""
    import transformers

    folder = Path(path).expanduser()
    if not folder.is_dir() and not may_be_hub_id(path):
        raise InputError(f"{path}: no such folder{nearest_folder(folder)}")
    if folder.is_dir():
        # transformers' complaints about these name neither the file nor what is wrong with it.
        read_config(folder), read_adapter_config(folder)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
            raise InputError(f"{path} holds no tokenizer (no {TOKENIZER_FILES[0]}); copy it from the base model")
    else:
        go_offline_without_network()
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        what = "no tokenizer that transformers can load; a folder with tokenizer.json is right"
        raise reading_error(path, what, error) from error


def choose_padding_token(tokenizer: "PreTrainedTokenizerBase") -> PaddingToken:
    """Choose an existing padding token: the tokenizer's own, a reserved one or unk, if that is no end token; else EOS.

    Masks never come from ids, so EOS is safe for training; but a reward model saved with it must set pad_token_id to
    None, because transformers pools its score by comparing ids. Raises InputError if the tokenizer has not even an EOS.
    """
    ends = end_token_ids(tokenizer)
    vocabulary = tokenizer.get_vocab()
    own, unk = tokenizer.pad_token_id, tokenizer.unk_token_id
    if own is not None and own not in ends:
        return PaddingToken(own, tokenizer.pad_token, "tokenizer")
    for name in RESERVED_NAMES:
        if name in vocabulary and vocabulary[name] not in ends:
            return PaddingToken(vocabulary[name], name, "reserved")
    if unk is not None and unk not in ends:
        return PaddingToken(unk, tokenizer.unk_token, "unk")
    if tokenizer.eos_token_id is None:
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no pad, reserved, unk or EOS token to pad with")
    return PaddingToken(tokenizer.eos_token_id, tokenizer.eos_token, "eos")


def eos_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_config: "GenerationConfig | None" = None
) -> frozenset[int]:
    """Return all ids that end a response: tokenizer's EOS, template's end-of-turn token, generation_config's list."""
    configured = generation_config.eos_token_id if generation_config is not None else None
    extra = [configured] if isinstance(configured, int) else configured or []
    return end_token_ids(tokenizer) | frozenset(extra)


def prepare_tokenizer(path: str, template: str) -> Any:
    """Load the tokenizer, with the run's chat template and a padding token that exists (the vocabulary never grows).

    The model's files are checked first, and that tokenizer and model belong together: rows are tokenised for minutes
    before weights are read. Raises InputError, EnvironmentFault.
    """
    check_model(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(path, tokenizer)
    set_template(tokenizer, template, plain=is_encoder_decoder(path))
    padding = choose_padding_token(tokenizer)
    if padding.source != "tokenizer":
        log.info("padding with %s (%s); masks never come from token ids", padding.token, padding.source)
        tokenizer.pad_token = padding.token
    return tokenizer
