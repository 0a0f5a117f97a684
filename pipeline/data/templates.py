"""Chat templates: choose one, and encode conversations whose prompt is an exact token prefix of the whole.

Texts are rendered by transformers' sandboxed `apply_chat_template` and encoded without added special tokens, since the
template contains the BOS. Training, rollouts and chat all encode prompts with `encode_prompt`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.processes import TimeLimitError, memory_limit, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainTurns = Literal["all", "last"]

HUMAN_ASSISTANT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '\\n\\nHuman: ' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '\\n\\nAssistant: ' + message['content'] + eos_token }}"
    "{%- elif loop.first -%}{{ message['content'] }}"
    "{%- else -%}{{ raise_exception('a system turn must come first') }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n\\nAssistant:' }}{%- endif -%}"
)
# A template is a program from a file, so it gets limits. Published ones are below 20,000 characters, render in a
# millisecond, and add some words to each turn.
MAX_TEMPLATE_CHARS = 100_000
MAX_RENDER_S = 5.0
MAX_GROWTH = 20
MAX_PROBE_BYTES = 2**30
# Prepended for tokenizers whose own encode starts with BOS.
BOS_PREFIX = "{{- bos_token -}}"


class RefusedTurnsError(InputError):
    """The template refuses these turns, a system turn for example; other rows may be accepted."""


class EncodedConversation(NamedTuple):
    """A tokenised conversation of S tokens.

    ids: S token ids, ending in the end-of-turn token of the last turn. trained: S flags, True = the loss counts this
    token as a target. num_boundaries: how many pieces had to be encoded on their own to keep a prefix exact.
    """

    ids: list[int]
    trained: list[bool]
    num_boundaries: int


def set_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Set `tokenizer.chat_template` to the template of this name, after checking it.

    name: 'tokenizer' (its own), 'human_assistant', or 'auto' (its own if it has one). Raises InputError for another
    name, 'tokenizer' without one, 'human_assistant' for a tokenizer without an EOS token, and an own template that is
    too long, fails, or leaves out a turn's content.
    """
    if name not in ("auto", "tokenizer", "human_assistant"):
        raise InputError(f"template {name!r}: auto, tokenizer or human_assistant are right")
    own = tokenizer.chat_template
    own = own.get("default") if isinstance(own, dict) else own
    if name == "tokenizer" and own is None:
        raise InputError(
            f"template tokenizer: {_name(tokenizer)} has no chat template; auto or human_assistant are right"
        )
    if name != "human_assistant" and own is not None:
        tokenizer.chat_template = own
        _check_own_template(tokenizer)
        return
    if tokenizer.eos_token is None:
        raise InputError(f"template human_assistant: {_name(tokenizer)} has no EOS token to end a turn with")
    bos_id, first = tokenizer.bos_token_id, list(tokenizer("a")["input_ids"])[:1]
    adds_bos = bos_id is not None and first == [bos_id]
    tokenizer.chat_template = (BOS_PREFIX if adds_bos else "") + HUMAN_ASSISTANT_TEMPLATE


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], add_generation_prompt: bool = False
) -> str:
    """Render a conversation as text.

    Raises:
        RefusedTurnsError: the template does not accept the turns.
        InputError: rendering takes longer than MAX_RENDER_S, or makes more text than MAX_GROWTH allows.
    """
    turns = [asdict(message) for message in messages]
    num_chars = sum(len(message.content) for message in messages)
    try:
        with time_limit(MAX_RENDER_S):
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TimeLimitError:
        raise InputError(
            f"the chat template of {_name(tokenizer)} does not end within {MAX_RENDER_S:.0f} s; --template "
            "human_assistant does without it"
        ) from None
    except Exception as error:
        # A template is a program from a file: besides jinja2's own errors it may meet any other.
        raise RefusedTurnsError(f"the chat template of {_name(tokenizer)} refuses a conversation: {error}") from error
    if len(text) > MAX_TEMPLATE_CHARS + MAX_GROWTH * num_chars:
        raise InputError(f"the chat template of {_name(tokenizer)} makes {len(text)} characters of {num_chars}")
    return str(text)


def _check_own_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise InputError for a template that is no text, too long, fails, or leaves out a turn's content."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS:
        kind = f"{len(template)} characters" if isinstance(template, str) else type(template).__name__
        raise InputError(
            f"{_name(tokenizer)}: its chat template: found {kind}, wanted a text of at most {MAX_TEMPLATE_CHARS}"
        )
    question, answer = "question", "answer"
    with memory_limit(MAX_PROBE_BYTES):
        text = render(tokenizer, [Message("user", question), Message("assistant", answer)])
    if question not in text or answer not in text:
        raise InputError(
            f"{_name(tokenizer)}: its chat template leaves out what user or assistant said; "
            "--template human_assistant does without it"
        )


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encode text without adding special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts that the tokenizer encodes as special tokens, longest first."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*tokenizer.all_special_tokens, *added} - {""}, key=lambda text: (-len(text), text)))


def broken_up(text: str, special: Sequence[str]) -> str:
    """Put a space inside whatever spells a special token in `text`: '</s>' -> '< /s>'.

    Unchanged it would be encoded as the real token: a forged end of turn, from a file or from a chat's user.
    """
    for token in special:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def plain_turns(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[Message]:
    """Return the turns with every text that spells a special token broken up."""
    special = special_texts(tokenizer)
    return [Message(message.role, broken_up(message.content, special)) for message in messages]


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> list[int]:
    """Encode the prompt up to and with the generation prompt, as a model gets it."""
    return encode_text(tokenizer, render(tokenizer, plain_turns(tokenizer, messages), add_generation_prompt=True))


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    train_turns: TrainTurns = "all",
    ends: frozenset[int] | None = None,
) -> EncodedConversation:
    """Encode turns that end in an assistant turn; the prompt before each trained turn is an exact token prefix.

    Trained are the content of the assistant turns ('all', or the 'last' one only) and the token that ends each turn.
    The ids end with the last turn's end token; if the template puts none there, EOS is appended. Callers with many
    conversations pass `ends` = end_token_ids(tokenizer). Raises InputError if the template rewrites
    earlier turns, so that a prompt is no prefix of the whole.
    """
    targets = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not targets or targets[-1] != len(messages) - 1:
        raise ValueError("a conversation to train on ends in an assistant turn")
    messages = plain_turns(tokenizer, messages)
    pieces = _pieces(tokenizer, messages, targets if train_turns == "all" else targets[-1:])
    ends = end_token_ids(tokenizer) if ends is None else ends
    text, ids, trained, num_boundaries = "", list[int](), list[bool](), 0
    for piece, is_response in pieces:
        text += piece
        whole = encode_text(tokenizer, text)
        is_joined = whole[: len(ids)] == ids
        # The tokenizer may merge across the boundary. A model that gets the prompt cannot: encode the piece by itself.
        new = whole[len(ids) :] if is_joined else encode_text(tokenizer, piece)
        num_boundaries += not is_joined
        # Trained are a response's tokens up to its last end token, or all if it has none.
        last = max((position for position, token in enumerate(new, 1) if token in ends), default=len(new))
        length = last if is_response else 0
        ids += new
        trained += [True] * length + [False] * (len(new) - length)
    length = max((position for position, is_trained in enumerate(trained, 1) if is_trained), default=0)
    ids, trained = ids[:length], trained[:length]
    if not ids or ids[-1] not in ends:
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"{_name(tokenizer)}: neither its chat template nor the tokenizer has an end-of-turn token"
            )
        ids.append(tokenizer.eos_token_id)
        trained.append(True)
    return EncodedConversation(ids, trained, num_boundaries)


def end_token_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids that end an assistant turn: EOS, and the special token that the template puts after it, if any."""
    ends = {tokenizer.eos_token_id} - {None}
    question, marker = Message("user", "a"), "response"
    if tokenizer.chat_template is not None:
        tail = render(tokenizer, [question, Message("assistant", marker)]).rpartition(marker)[2]
        special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        ends.update([token for token in encode_text(tokenizer, tail) if token in special][:1])
    return frozenset(ends)


def _pieces(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], targets: Sequence[int]
) -> list[tuple[str, bool]]:
    """Render and cut the text at each target turn: (text, True for a response with what the template puts after it)."""
    whole = render(tokenizer, messages)
    pieces: list[tuple[str, bool]] = []
    start = 0
    for index in targets:
        prompt = render(tokenizer, messages[:index], add_generation_prompt=True)
        turn = whole if index == len(messages) - 1 else render(tokenizer, messages[: index + 1])
        if not (whole.startswith(turn) and turn.startswith(prompt) and len(prompt) >= start):
            raise InputError(
                f"the chat template of {_name(tokenizer)} rewrites earlier turns, so that no prompt is a prefix of its "
                "conversation; --train_turns last or --template human_assistant are right"
            )
        pieces += [(whole[start : len(prompt)], False), (whole[len(prompt) : len(turn)], True)]
        start = len(turn)
    return pieces


def _name(tokenizer: "PreTrainedTokenizerBase") -> str:
    return str(tokenizer.name_or_path) or type(tokenizer).__name__
