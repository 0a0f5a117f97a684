"""Load a tokenizer, choose its padding token and find every token that ends a text.

The vocabulary never changes. Chat templates are in `data/templates.py`; here they get --chat-template-kwargs.
"""

import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.data.templates import RefusedTurnsError, encode_text, end_token_ids, render
from pipeline.data.turns import Message, encoder_of
from pipeline.errors import InputError, nearest
from pipeline.hub import go_offline_without_network, split_revision
from pipeline.models.paths import may_be_hub_id, nearest_folder, read_adapter_config, read_config, reading_error
from pipeline.models.weight_files import SENTENCEPIECE_FILES, TOKENIZER_FILES

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

REPLACED = re.compile(r'"content":"((?:[^"\\]|\\.)*)"')  # what a normalizer puts in the place of a text
MAX_GROWTH = 100  # of a text by them; published ones put a character in the place of one
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

# A line in front of a chat template that gives a name its value where no caller does: of ours, and for any program.
DEFAULT_LINE = re.compile(r"\{%- if (\w+) is not defined %\}\{%- set \1 = .* %\}\{%- endif %\}\n")
GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # which jinja2 by itself does not know
# What transformers gives each template, besides the tokenizer's special tokens.
ALWAYS_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


@dataclass(frozen=True, slots=True)
class PaddingToken:
    """A padding token: its id, its text and its source. 'eos' means that no other token can be used for padding."""

    pad_id: int
    token: str
    source: Literal["tokenizer", "reserved", "unk", "eos"]


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a local folder or hub id.

    Its `vocab_file` is the SentencePiece model that is there, if any. Raises InputError or EnvironmentFault with one
    line.
    """
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
        name, revision = split_revision(str(folder))
        loaded = transformers.AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
        normalizer = loaded.backend_tokenizer.normalizer if loaded.is_fast else None
        replaced = REPLACED.findall(normalizer.__getstate__().decode()) if normalizer else []
        if (growth := math.prod(max(1, len(text)) for text in replaced)) > MAX_GROWTH:
            raise ValueError(f"its normalizer makes up to {growth:,} characters of one")
    except Exception as error:
        what = "no tokenizer that transformers can load; a folder with tokenizer.json is right"
        raise reading_error(path, what, error) from error
    if not encoder_of(loaded)(string.printable):
        raise InputError(
            f"{path}: its tokenizer encodes plain text to no tokens (vocabulary: {len(loaded)}); copy the tokenizer "
            "files from the folder that the weights came from"
        )
    if (file := sentencepiece_file(name, revision)) is not None:
        loaded.vocab_file = file  # which some of transformers' classes leave out
    return loaded


def sentencepiece_file(name: str, revision: str | None) -> str | None:
    """Return the SentencePiece model beside the tokenizer of a folder or hub id; None where there is none."""
    from transformers.utils import cached_file

    for file in SENTENCEPIECE_FILES:
        with suppress(OSError):
            return cached_file(name, file, revision=revision or "main")
    return None


def template_values(words: Sequence[str]) -> dict[str, Any]:
    """Parse --chat-template-kwargs: `enable_thinking=false` -> {"enable_thinking": False}. Raises InputError."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()) or name in values:
            given = f"{name} twice" if name in values else repr(word)
            raise InputError(f"--chat-template-kwargs: got {given}, expected NAME=VALUE words: enable_thinking=false")
        try:
            values[name] = json.loads(text, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("templates have no word for it")
    return number


def set_template_values(tokenizer: "PreTrainedTokenizerBase", values: Mapping[str, Any], *, all_of: bool) -> None:
    """Set default values, inside the chat template itself, for names that it reads; a caller may override them.

    So every program that renders the saved template uses them. Each name has one line in front of the template, which
    replaces the line of an earlier stage.

    Args:
        all_of: refuse a name that the template does not read; else it is left out.

    Raises:
        InputError: such a name, or the template refuses a conversation with these values.
    """
    if not values:
        return
    templates, lines = tokenizer.chat_template, dict[str, str]()
    template = str(templates.get("default", "") if isinstance(templates, dict) else templates)
    while match := DEFAULT_LINE.match(template):
        lines[match[1]], template = match[0], template[match.end() :]
    read = names_read(tokenizer, template)
    for name, value in values.items():
        if name in read:
            literal = str(value).lower() if isinstance(value, bool) else repr(value)
            lines[name] = f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}\n"
        elif all_of:
            right = nearest(name, read) or f"; it reads {', '.join(sorted(read)) or 'no name'}"
            raise InputError(
                f"--chat-template-kwargs {name}: the chat template of {tokenizer.name_or_path} does not read it{right}"
            )
    if not lines:
        return
    tokenizer.chat_template = "".join(lines[name] for name in sorted(lines)) + template
    try:
        render(tokenizer, [Message("user", "question"), Message("assistant", "answer")])
    except InputError as error:
        raise InputError(f"--chat-template-kwargs: {error}") from None


def names_read(tokenizer: "PreTrainedTokenizerBase", template: str) -> set[str]:
    """Return the names that a chat template reads and for which transformers has no value. Raises InputError."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(GENERATION_MARKS.sub("", template))
    except TemplateError as error:
        raise InputError(f"{tokenizer.name_or_path}: its chat template cannot be read: {error}") from None
    return meta.find_undeclared_variables(parsed) - ALWAYS_GIVEN - tokenizer.special_tokens_map.keys()


def choose_padding_token(tokenizer: "PreTrainedTokenizerBase") -> PaddingToken:
    """Choose an existing padding token: the tokenizer's own, a reserved one or unk, if that is no end token; else EOS.

    Masks never come from ids, so EOS is safe for training; but a reward model saved with it must set pad_token_id to
    None, because transformers pools its score by comparing ids. Raises InputError if the tokenizer has not even an EOS.
    """
    ends = end_token_ids(tokenizer)
    vocabulary = tokenizer.get_vocab()
    pad, unk = tokenizer.pad_token_id, tokenizer.unk_token_id
    if pad is not None and pad not in ends:
        return PaddingToken(pad, tokenizer.pad_token, "tokenizer")
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


def num_token_ids(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return one more than the highest id that the tokenizer has; a model's vocabulary may be padded beyond it."""
    return int(max(tokenizer.get_vocab().values())) + 1


def usable_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the ids that a row can contain: special tokens only if the template or the tokenizer itself adds them.

    Text that spells a special token is broken up.
    """
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id} - {None}
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    rendered = set[int]()
    for roles in (("user", "assistant"), ("system", "user")):
        with suppress(RefusedTurnsError):
            text = render(tokenizer, [Message(role, "a") for role in roles], roles[-1] == "user")
            rendered.update(encode_text(tokenizer, text))
    return set(tokenizer.get_vocab().values()) - special | named | rendered


def same_tokens(first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase") -> bool:
    """Return whether two tokenizers map text to the same ids."""
    return bool(first.get_vocab() == second.get_vocab())
