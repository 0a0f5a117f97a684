"""Chat templates: choose one, and encode conversations so that each prompt is an exact token prefix of the whole.

transformers' sandboxed `apply_chat_template` renders texts. They are encoded without added special tokens, because the
template contains the BOS token. Training, rollouts and chat all encode prompts with `encode_prompt`.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.data.turns import (
    Message,
    SpecialTokens,
    encoder_of,
    ids_of_pieces,
    keeps_words_apart,
    plain_turns,
    special_texts,
    split_text,
    split_tools,
)
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
# Template of encoder-decoder models: the request, which the encoder reads, then the response, each followed by EOS. If
# the tokenizer puts a BOS before a text, the template does too: BART generates it first (forced_bos_token_id).
PLAIN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.index0 > 1 + (messages[0]['role'] == 'system') -%}"
    "{{ raise_exception('an encoder-decoder model takes one request and one response') }}{%- endif -%}"
    "{%- if start is defined and message['role'] == 'assistant' -%}{{ start }}{%- endif -%}"
    "{{ message['content'] + ('\\n\\n' if message['role'] == 'system' else eos_token) }}"
    "{%- endfor -%}"
)
# Limits of a template, which is a program from a file: its characters, the seconds it may render, the characters that
# it may make of each character of a conversation, and the bytes that its check may allocate. Chosen by hand; published
# templates are shorter than 20,000 characters and render in a millisecond.
MAX_TEMPLATE_CHARS = 100_000
MAX_RENDER_S = 5.0
MAX_GROWTH = 20
MAX_PROBE_BYTES = 2**30
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Prefixes of a template for a tokenizer whose own `encode` starts with BOS.
BOS_PREFIX = "{{- bos_token -}}"
PLAIN_BOS_PREFIX = "{%- set start = bos_token -%}{{- start -}}"


class RefusedTurnsError(InputError):
    """The template rejects these turns, for example a system turn; it may accept those of other rows."""


class RewrittenTurnsError(InputError):
    """The template renders a prompt that is no prefix of its conversation; the last turn may still be trained."""


class EncodedConversation(NamedTuple):
    """A tokenised conversation of S tokens.

    ids: S token ids, of which the last is the end-of-turn token of the last turn.
    trained: S flags; True: the token is a target of the loss.
    num_boundaries: number of pieces that were encoded separately so that a prompt stays an exact prefix.
    prompt_length: tokens of the prompt before the first trained turn.
    """

    ids: list[int]
    trained: list[bool]
    num_boundaries: int
    prompt_length: int


def set_template(tokenizer: "PreTrainedTokenizerBase", name: str, *, plain: bool = False) -> None:
    """Check the template of this name and set it as `tokenizer.chat_template`.

    Args:
        name: 'tokenizer' (the tokenizer's own template), 'human_assistant', or 'auto' (the tokenizer's own if it has
            one, else human_assistant).
        plain: without an own template, 'auto' is PLAIN_TEMPLATE, for encoder-decoder models.

    Raises:
        InputError: another name, 'tokenizer' for a tokenizer without a template, 'human_assistant' for one without an
            EOS token, or a template that is too long, fails, or omits the content of a turn.
    """
    if name not in ("auto", "tokenizer", "human_assistant"):
        raise InputError(f"template: got {name!r}, expected auto, tokenizer or human_assistant")
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if name == "tokenizer" and template is None:
        raise InputError(f"template tokenizer: {name_of(tokenizer)} has no chat template; give auto")
    if name != "human_assistant" and template is not None:
        tokenizer.chat_template = template
        _check_own_template(tokenizer)
        return
    if tokenizer.eos_token is None:
        raise InputError(
            f"template human_assistant: {name_of(tokenizer)} has no EOS token to end a turn with; name one as "
            "eos_token in its tokenizer_config.json (of BERT: [SEP], and [CLS] as bos_token)"
        )
    bos_id, first = tokenizer.bos_token_id, list(tokenizer("a")["input_ids"])[:1]
    adds_bos = bos_id is not None and first == [bos_id]
    is_plain = plain and name == "auto"
    prefix, chosen = (PLAIN_BOS_PREFIX, PLAIN_TEMPLATE) if is_plain else (BOS_PREFIX, HUMAN_ASSISTANT_TEMPLATE)
    tokenizer.chat_template = (prefix if adds_bos else "") + chosen


def render(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], add_generation_prompt: bool = False
) -> str:
    """Render a conversation as text.

    Raises:
        RefusedTurnsError: the template does not accept the turns.
        InputError: rendering takes longer than MAX_RENDER_S, or the text is longer than MAX_GROWTH allows.
    """
    tools, turns = split_tools(messages)
    return render_turns(tokenizer, turns, tools, add_generation_prompt)


def render_turns(
    tokenizer: "PreTrainedTokenizerBase",
    turns: Sequence[dict[str, Any]],
    tools: Sequence[Any] | None,
    add_generation_prompt: bool = False,
) -> str:
    """Render turns as transformers takes them, which may call tools, as `render` does."""
    num_chars = sum(len(turn["content"]) for turn in turns) + (len(json.dumps(tools)) if tools else 0)
    options: Any = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    try:
        with time_limit(MAX_RENDER_S):
            text = tokenizer.apply_chat_template(list(turns), tokenize=False, **options)
    except TimeLimitError:
        raise InputError(
            f"the chat template of {name_of(tokenizer)} does not end within {MAX_RENDER_S:.0f} s; give "
            "--template human_assistant"
        ) from None
    except Exception as error:
        # A template is a program from a file, so it can raise any error, not only those of jinja2.
        reason = str(error) or type(error).__name__  # a MemoryError has no text
        raise RefusedTurnsError(
            f"the chat template of {name_of(tokenizer)} rejects a conversation: {reason}"
        ) from error
    if len(text) > MAX_TEMPLATE_CHARS + MAX_GROWTH * num_chars:
        raise InputError(f"the chat template of {name_of(tokenizer)} renders {num_chars} characters as {len(text)}")
    return str(text)


def _check_own_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise InputError if the template is no text, is too long, fails, or omits the content of a turn."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS:
        kind = f"{len(template)} characters" if isinstance(template, str) else type(template).__name__
        raise InputError(
            f"{name_of(tokenizer)}: its chat template: got {kind}, expected a text of at most {MAX_TEMPLATE_CHARS}"
        )
    question, answer = "question", "answer"
    with memory_limit(MAX_PROBE_BYTES):
        text = render(tokenizer, [Message("user", question), Message("assistant", answer)])
    if question not in text or answer not in text:
        raise InputError(
            f"{name_of(tokenizer)}: its chat template omits the content of user or assistant turns; give "
            "--template human_assistant"
        )


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encode text without adding special tokens."""
    return encoder_of(tokenizer)(text)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> SpecialTokens:
    """Return the special tokens and cached functions that encoding needs, computed once for many conversations."""
    texts = special_texts(tokenizer)
    ids: Any = tokenizer.convert_tokens_to_ids(list(texts))
    render_prompt = lru_cache(1)(partial(render, tokenizer, add_generation_prompt=True))
    encode, by_id = encoder_of(tokenizer), dict(zip(ids, texts, strict=True))
    split = partial(split_text, encode, by_id, keeps_words_apart(tokenizer, len(tokenizer)))
    return SpecialTokens(texts, by_id, end_token_ids(tokenizer), encode, render_prompt, split, lru_cache(1)(split))


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], special: SpecialTokens | None = None
) -> list[int]:
    """Encode the messages with the generation prompt, which a model continues."""
    texts = special.texts if special else special_texts(tokenizer)
    return encode_text(tokenizer, render(tokenizer, plain_turns(messages, texts), add_generation_prompt=True))


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    train_turns: TrainTurns = "all",
    special: SpecialTokens | None = None,
) -> EncodedConversation:
    """Encode turns, the last of the assistant; the prompt before each trained turn is an exact token prefix.

    The loss trains the content of assistant turns and the token that ends each. If the template has `{% generation %}`
    marks, it trains the marked text instead. The ids end with the first end token after the last answer, where a
    sampler stops; if the template has none there, EOS is appended. Time is linear in the number of turns if the
    template ends each turn with a special token.

    Args:
        train_turns: 'all' assistant turns, or only the 'last'.
        special: the result of `special_tokens`, for callers with many conversations.

    Raises:
        RewrittenTurnsError: a prompt is no prefix of the conversation.
    """
    targets = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not targets or targets[-1] != len(messages) - 1:
        raise ValueError("a conversation to train on ends in an assistant turn")
    special = special or special_tokens(tokenizer)
    messages = plain_turns(messages, special.texts)
    pieces = _pieces(tokenizer, messages, targets if train_turns == "all" else targets[-1:], special)
    pieces = _at_marks(tokenizer, messages, pieces, train_turns, special)
    ids, trained, num_boundaries = list[int](), list[bool](), 0
    encoded = list(ids_of_pieces([piece for piece, _ in pieces], special))
    for (_, is_trained), (new, is_joined) in zip(pieces, encoded, strict=True):
        num_boundaries += not is_joined
        ids += new
        trained += [is_trained] * len(new)
    length = next((size for size in range(len(trained), 0, -1) if trained[size - 1]), 0)
    ids, trained = ids[:length], trained[:length]
    if not ids or ids[-1] not in special.ends:
        if tokenizer.eos_token_id is None:
            raise InputError(f"{name_of(tokenizer)}: neither it nor its chat template has an end-of-turn token")
        ids.append(tokenizer.eos_token_id)
        trained.append(True)
    return EncodedConversation(ids, trained, num_boundaries, len(encoded[0][0]))


def end_token_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the ids that end an assistant turn: EOS, and the special token that the template puts after it, if any."""
    ends = {tokenizer.eos_token_id} - {None}
    question, marker = Message("user", "a"), "response"
    if tokenizer.chat_template is not None:
        tail = render(tokenizer, [question, Message("assistant", marker)]).rpartition(marker)[2]
        special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        ends.update([token for token in encode_text(tokenizer, tail) if token in special][:1])
    return frozenset(ends)


def _at_marks(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    pieces: list[tuple[str, bool]],
    train_turns: TrainTurns,
    special: SpecialTokens,
) -> list[tuple[str, bool]]:
    """Split the pieces at the template's `{% generation %}` marks, if it has any: then only marked text is trained.

    An end token directly after a marked text is trained too, because without it the model would never stop.
    """
    if not GENERATION_MARK.search(str(tokenizer.chat_template)):
        return pieces
    from transformers.utils.chat_template_utils import render_jinja_template

    options: Any = {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    tools, turns = split_tools(messages)
    marked: Any = render_jinja_template([turns], tools, return_assistant_tokens_mask=True, **options)
    ends, spans, start = special.end_texts, list[tuple[str, bool]](), 0
    for text, is_response in pieces:
        start_at, size = 0, len(text)
        for first, last in ((first - start, last - start) for first, last in marked[1][0]):
            # A marked text may include the header of its turn, and reach beyond the token that ends it.
            is_header = last > size and train_turns == "all"
            if first < size and last > start_at and (is_response or is_header):
                last = size if last > size or text[last:] in ends else last
                spans += [(text[start_at : max(first, start_at)], False), (text[max(first, start_at) : last], True)]
                start_at = last
        spans.append((text[start_at:], False))
        start += size
    return spans if any(is_trained for _, is_trained in spans) else pieces


def _pieces(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], targets: Sequence[int], special: SpecialTokens
) -> list[tuple[str, bool]]:
    """Render the conversation and split it at each target turn, up to the end token of the last.

    Returns (text, True for an answer with its end token) for each piece. Most templates render an exchange to the same
    text after any other exchange. So each exchange is first rendered after a short one, in linear time; if the texts do
    not match the whole, every prefix is rendered.
    """
    whole = render(tokenizer, messages)
    if len(targets) > 2:
        first = messages[: targets[0] + 1]
        short = [turn if turn.role == "tools" else Message(turn.role, "a") for turn in first]
        with suppress(RefusedTurnsError):
            if pieces := _split_at_targets(tokenizer, whole, messages, targets, special, before=short):
                return pieces
    if pieces := _split_at_targets(tokenizer, whole, messages, targets, special):
        return pieces
    raise RewrittenTurnsError(
        f"the chat template of {name_of(tokenizer)} rewrites earlier turns or the start of an answer, so that no "
        "prompt is a prefix of its conversation; --template human_assistant does not"
    )


def _split_at_targets(
    tokenizer: "PreTrainedTokenizerBase",
    whole: str,
    messages: Sequence[Message],
    targets: Sequence[int],
    special: SpecialTokens,
    *,
    before: Sequence[Message] | None = None,
) -> list[tuple[str, bool]]:
    """Split `whole` at each target turn; return [] if a rendered turn does not match it.

    before: turns after which each exchange is rendered; None: all earlier turns.
    """
    pieces: list[tuple[str, bool]] = []
    start = first = 0
    head, head_text, rest = list[Message](), "", ""
    for index in targets:
        is_whole = before is None and index + 1 == len(messages)
        exchange = [*head, *messages[first : index + 1]]
        prompt, response, rest = _last_answer(tokenizer, exchange, special, whole if is_whole else None)
        turn = (prompt + response)[len(head_text) :]
        if not response or not prompt.startswith(head_text) or not whole.startswith(turn, start):
            return []
        pieces += [(prompt[len(head_text) :], False), (response, True)]
        start, first = start + len(turn), index + 1
        if before is None:
            head, head_text = list(messages[:first]), whole[:start]
        elif not head:
            head, head_text = list(before), "".join(_last_answer(tokenizer, before, special)[:2])
    return pieces if whole[start:] == rest else []


def _last_answer(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], special: SpecialTokens, text: str | None = None
) -> tuple[str, str, str]:
    """Return the prompt, the answer with its first end token (where a sampler stops), and the text after that.

    The answer is empty if the text does not begin with the prompt.

    text: rendered text of the messages; None: it is rendered here.
    """
    prompt = special.render_prompt(tuple(messages[:-1]))
    text = render(tokenizer, messages) if text is None else text
    if not text.startswith(prompt):
        return prompt, "", ""
    answer, ends = messages[-1].content, special.end_texts
    answer_end = text.find(answer, len(prompt))
    answer_end = len(prompt) if answer_end < 0 else answer_end + len(answer)
    stops = [stop + len(end) for end in ends if (stop := text.find(end, answer_end)) >= 0]
    stop = min(stops, default=len(text))
    return prompt, text[len(prompt) : stop], text[stop:]


def name_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what messages call a tokenizer."""
    return str(tokenizer.name_or_path) or type(tokenizer).__name__
