"""Turns that call tools and the results of their calls, as a chat template writes them.

An episode with tools is a list of token ids: the prompt, a sampled turn, the results of its calls, a sampled turn, and
so on. Sampled ids are never decoded and encoded again. `ToolTurns` reads the calls of a sampled turn, and returns the
ids that the template puts between its end token and the next sampled token.

The format of calls is read from the template: it renders a turn that calls a tool, and what stands before, between and
behind the marked name and arguments is the format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pipeline.data.templates import RefusedTurnsError, name_of, render_turns, special_tokens
from pipeline.data.tool_calls import THINK, CallFormat, CallReader, ToolCall, WrongCall
from pipeline.data.turns import broken_up
from pipeline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Marks in the turns that the format is read from.
NAME, OTHER_NAME, KEY, VALUE, ANSWER = "zqname", "zqother", "zqkey", "zqvalue", "zqanswer"
ARGUMENTS = {KEY: VALUE}
QUESTION = {"role": "user", "content": "question"}
JSON_START = re.compile(r"[\[{]")


class SampledTurn(NamedTuple):
    """A sampled assistant turn.

    message: it with "role", "content" and, if it has valid calls, "tool_calls". The content is all that is no valid
        call: thoughts, other text, and wrong calls as the model wrote them.
    calls: its calls, in order; [] if it calls nothing and is the answer.
    call_ids: the id that the model gave each call, of any JSON type; None: it gave none.
    """

    message: dict[str, Any]
    calls: list[ToolCall | WrongCall]
    call_ids: list[Any]


class ToolTurns:
    """Reads the calls of sampled turns, and encodes the results of tools, as a tokenizer's chat template writes them.

    A template may rewrite earlier assistant turns: Qwen 3's drops their thoughts. The ids of an episode stay what was
    sampled, and only what the template puts behind a turn is added. That must be the same in each round of calls and
    results, which is checked once, when the object is made.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Mapping[str, Any]]) -> None:
        """Read the template's format of calls, and check two rounds of calls and results.

        Args:
            tools: JSON schemas of the tools, as `apply_chat_template` takes them.

        Raises:
            InputError: the template does not render tools, their calls or their results, rejects such turns, writes
                calls in a format that cannot be read, or renders results differently in later rounds.
        """
        self._tokenizer, self._special = tokenizer, special_tokens(tokenizer)
        self._tools = [dict(tool) for tool in tools]
        functions = [tool.get("function", tool) for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        try:
            prompt = self._render([QUESTION])
            if prompt == render_turns(tokenizer, [QUESTION], None) or not all(name in prompt for name in schemas):
                self._refuse("does not render tools")
            self._start = len(prompt)
            self._generation_prompt = self._render([QUESTION], add_generation_prompt=True)[self._start :]
            self._format = self._read_format()
            self._check_rounds([*schemas, OTHER_NAME])
        except RefusedTurnsError as error:
            self._refuse(f"rejects turns with tools ({str(error.__cause__).strip().splitlines()[0]})")
        self._reader = CallReader(self._format, schemas, self._generation_prompt.rstrip().endswith(THINK))

    def read(self, ids: Sequence[int]) -> SampledTurn:
        """Return one sampled assistant turn with its calls.

        Args:
            ids: the sampled ids of the turn, with its end token. A turn that was truncated has none, and may hold an
                unclosed call, which is a WrongCall.
        """
        text, rest, end = self._text(ids), "", 0
        parts = self._reader.find(text)
        calls = [call for part in parts for call in part.calls]
        if valid := [call for call in calls if isinstance(call, ToolCall)]:
            for part in parts:
                if all(isinstance(call, ToolCall) for call in part.calls):
                    rest, end = rest + text[end : part.start], part.end
            rest += text[end:]
            for token in self._special.texts:
                rest = rest.replace(token, "")
            message = _calling([(call.name, call.arguments) for call in valid], rest.strip())
        else:
            message = {"role": "assistant", "content": self._tokenizer.decode(list(ids), skip_special_tokens=True)}
        return SampledTurn(message, calls, [one for part in parts for one in part.call_ids])

    def results(self, results: Sequence[tuple[str, str]], call_ids: Sequence[Any]) -> list[int]:
        """Return the ids between the end token of a sampled turn that calls tools and the next sampled token.

        They are the rest of the assistant turn (a newline of Qwen's), the turns of the results, and the generation
        prompt. Texts that spell special tokens are broken up.

        Args:
            results: name and text of each result, in the order of the calls.
            call_ids: those of the turn that calls. A template that writes ids of calls (Mistral's) needs them, because
                a result repeats the id that the model wrote.
        """
        plain = [(self._plain(name), self._plain(text)) for name, text in results]
        if self._format.id_key is not None:
            ids = [self._plain(one) if isinstance(one, str) else _call_id(n) for n, one in enumerate(call_ids)]
            with suppress(RefusedTurnsError):  # an id that the template does not accept
                return self._encode(self._added(_round(plain, ids)))
        return self._encode(self._added(_round(plain)))

    def _plain(self, text: str) -> str:
        """Break up special tokens in a text of a tool or a model, and replace what UTF-8 cannot encode."""
        return broken_up(text.encode(errors="replace").decode(), self._special.texts)

    def _render(self, turns: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        return render_turns(self._tokenizer, turns, self._tools, add_generation_prompt)

    def _text(self, ids: Sequence[int]) -> str:
        """Decode a sampled turn without its end token, with the special tokens that some formats of calls have."""
        ids = list(ids[:-1] if len(ids) and ids[-1] in self._special.ends else ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(
            f"--tools: the chat template of {name_of(self._tokenizer)} {what}; take a model whose template writes "
            "calls of tools as JSON, such as Qwen 3 or Llama 3.2, or leave out --tools"
        )

    def _end_of_turn(self, text: str, start: int) -> int:
        """Return the position of the first end token behind `start`."""
        ends = [at for end in self._special.end_texts if (at := text.find(end, start)) >= 0]
        if not ends:
            self._refuse("puts no end-of-turn token behind a call")
        return min(ends)

    def _added(self, turns: Sequence[dict[str, Any]]) -> str:
        """Render a round of calls and results; return the text from the end token of the turn that calls."""
        text = self._render([QUESTION, *turns], add_generation_prompt=True)
        return text[self._end_of_turn(text, text.index(VALUE, self._start)) :]

    def _encode(self, added: str) -> list[int]:
        """Encode what stands behind an end token, together with it: a tokenizer may treat a text's start apart."""
        return self._special.encode(added)[1:]

    def _read_format(self) -> CallFormat:
        """Read the format of calls from a turn with one call and, if the template accepts it, one with two."""
        answer = self._render([QUESTION, {"role": "assistant", "content": ANSWER}])
        text = self._render([QUESTION, *_round([(NAME, "")])[:1]])
        header = len(commonprefix([answer, text]))
        if NAME not in text or VALUE not in text:
            self._refuse("does not render the calls of an assistant turn")
        written = _written_call(text, header, NAME)
        if written is None:
            self._refuse("writes calls in another format")
        start, end, separator, item = written
        opening, closing = text[header:start].strip(), text[end : self._end_of_turn(text, end)].strip()
        keys = {json.dumps(value): key for key, value in item.items()}
        name_key, arguments_key = keys.get(json.dumps(NAME), ""), keys.get(json.dumps(ARGUMENTS), "")
        id_key = keys.get(json.dumps(_call_id(0)))
        if _call_id(0) in opening + (separator or "") or (separator is None and not (name_key and arguments_key)):
            self._refuse("writes calls in another format")
        several = False
        with suppress(RefusedTurnsError):
            text = self._render([QUESTION, _round([(NAME, ""), (OTHER_NAME, "")])[0]])
            several = OTHER_NAME in text[header:]
            first = _written_call(text, header, NAME)
            other = _written_call(text, first[1], OTHER_NAME) if first else None
            if first and other:  # they are not in one list
                between = text[first[1] : other[0]]
                halves = [(between[:at].strip(), between[at:].strip()) for at in range(len(between) + 1)]
                fitting = [one for one in halves if closing.startswith(one[0]) and opening.endswith(one[1])]
                if not fitting:
                    self._refuse("writes calls in another format")
                closing, opening = fitting[0]  # without what stands around all calls of a turn
        return CallFormat(opening, closing, separator, name_key, arguments_key, id_key, several and bool(opening))

    def _check_rounds(self, names: Sequence[str]) -> None:
        """Check two rounds with one result each, and with two if a turn may call twice.

        The whole conversation must end with the ids of the last round's results, behind an end token, and hold the text
        of the first round's. A generation prompt may be missing there: it may open a block of thoughts that the
        template drops later.
        """
        for count in (1, 2) if self._format.several else (1,):
            turns, before = [QUESTION], self._render([QUESTION])
            for number in range(2):
                results = [(name, f"zqresult{number}{name}") for name in names[:count]]
                turns += _round(results)
                added, text = self._added(_round(results)), self._render(turns, add_generation_prompt=True)
                if not re.search(".*".join(re.escape(result) for _, result in results), text, re.DOTALL):
                    self._refuse("does not render the results of tools")
                ids, new = self._special.encode(text), self._encode(added)
                is_same = ids[-len(new) :] == new and ids[-len(new) - 1] in self._special.ends
                if not is_same or before not in text:
                    self._refuse("renders the results of tools differently in later turns")
                before = added.removesuffix(self._generation_prompt)


def _calling(calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "") -> dict[str, Any]:
    """Return an assistant turn that calls tools, each by its name with arguments."""
    functions = [{"type": "function", "function": {"name": name, "arguments": dict(args)}} for name, args in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def _round(results: Sequence[tuple[str, str]], call_ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return an assistant turn that calls tools by name, with marked arguments, and the turns of their results."""
    ids = call_ids or [_call_id(number) for number in range(len(results))]
    turn = _calling([(name, ARGUMENTS) for name, _ in results])
    turn["tool_calls"] = [{**call, "id": call_id} for call, call_id in zip(turn["tool_calls"], ids, strict=True)]
    texts = zip(results, ids, strict=True)
    tools = [{"role": "tool", "name": name, "content": text, "tool_call_id": one} for (name, text), one in texts]
    return [turn, *tools]


def _call_id(number: int) -> str:
    return f"call{number:05d}"  # Mistral's templates take only ids of nine letters and digits


def _written_call(text: str, start: int, name: str) -> tuple[int, int, str | None, dict[str, Any]] | None:
    """Find the call of the tool `name` with ARGUMENTS in a rendered text; return None if it is not written in JSON.

    Returns its first character and the one behind it, the text between the name and the arguments (None: one JSON value
    holds both), and the JSON object.
    """
    named = text.find(name, start)
    for match in JSON_START.finditer(text, start):
        begin = match.start()
        with suppress(ValueError):
            value, end = json.JSONDecoder().raw_decode(text, begin)
            if begin < named < end:
                item = value[0] if isinstance(value, list) else value
                return (begin, end, None, item) if isinstance(item, dict) else None
            if 0 <= named < begin and value == ARGUMENTS:
                return named, end, text[named + len(name) : begin].strip(), value
    return None
