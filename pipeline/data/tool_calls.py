"""Calls of tools in the text of an assistant turn: their format, and a reader that checks them against schemas.

The reader describes a malformed call in one line, which the model gets as the result. transformers' `parse_response`
raises an error for one instead, and needs a `response_template`, which few tokenizers have.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"  # Llama's models may put it before a call; its templates write it for built-in tools only
MAX_DEPTH = 64  # levels of nested arguments, chosen by hand; a deeper value could not be sent to another process
MAX_QUOTED_CHARS = 60  # characters of a name from the model that a problem quotes
SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model requests.

    name: name of an existing tool. arguments: value of each argument, as JSON has them; required ones are present.
    """

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WrongCall:
    """A text that begins as a call but is no valid one.

    name: the name that the model wrote, or "" if none can be read. problem: one line, which the model gets as the
    result.
    """

    name: str
    problem: str


class CallFormat(NamedTuple):
    """The form in which a template writes the calls of a turn.

    opening: text in front of a call, or of a list of calls; "": a turn that calls consists of the JSON of one call.
    closing: text behind it; "": none is needed.
    separator: text between a name and the JSON of its arguments; None: one JSON object holds both.
    name_key, arguments_key: keys of that object.
    id_key: key of a call's id, which its result repeats; None: calls have none.
    several: the template accepts more than one call in a turn.
    """

    opening: str
    closing: str
    separator: str | None
    name_key: str
    arguments_key: str
    id_key: str | None
    several: bool


class CallPart(NamedTuple):
    """A part of a turn that calls tools.

    start, end: its first character and the one behind it. calls: what it calls, at least one. call_ids: the id that the
    model gave each call, of any JSON type; None: it gave none.
    """

    start: int
    end: int
    calls: list[ToolCall | WrongCall]
    call_ids: list[Any]


class CallReader:
    """Finds and checks the calls in the text of an assistant turn."""

    def __init__(self, call_format: CallFormat, schemas: Mapping[str, Mapping[str, Any]], in_thought: bool) -> None:
        """Set up the reader.

        Args:
            schemas: JSON schema of each tool's arguments, by the tool's name.
            in_thought: the prompt opens a block of thoughts, in which each turn begins.
        """
        self._format, self._schemas, self._in_thought = call_format, schemas, in_thought

    def find(self, text: str) -> list[CallPart]:
        """Return the parts of a turn that call tools, in order; thoughts hold none."""
        thinks = self._in_thought or text.lstrip().startswith(THINK)
        start = _behind(text, END_THINK, 0) if thinks else 0
        parts = list(self._marked(text, start) if self._format.opening else self._bare(text, start))
        calls = [call for part in parts for call in part.calls]
        if len(calls) > 1 and not self._format.several:
            wrong = WrongCall(calls[0].name, "a turn makes one call; make the others in later turns")
            return [CallPart(parts[0].start, parts[-1].end, [wrong], parts[0].call_ids[:1])]
        return parts

    def _marked(self, text: str, position: int) -> Iterator[CallPart]:
        """Yield each part that begins with the format's opening."""
        opening = self._format.opening
        while (start := text.find(opening, position)) >= 0:
            if 0 <= (thought := text.find(THINK, position)) < start:
                position = _behind(text, END_THINK, thought)
                continue
            calls, call_ids, position = self._read(text, start + len(opening))
            yield CallPart(start, position, calls, call_ids)

    def _bare(self, text: str, position: int) -> Iterator[CallPart]:
        """Yield the call that a turn consists of: JSON with the keys of a call, or text that begins as that does.

        Other JSON is an answer.
        """
        start = _spaces(text, position)
        is_marked = text.startswith(PYTHON_TAG, start)
        begin = start + len(PYTHON_TAG) if is_marked else start
        value, end, error = _parse(text, begin)
        name_key, arguments_key = self._format.name_key, self._format.arguments_key
        named = [item for item in _items(value) if isinstance(item, dict) and name_key in item]
        begins = r'\s*\[?\s*\{\s*("type"\s*:\s*"function"\s*,\s*)?' + re.escape(json.dumps(name_key)) + r"\s*:"
        is_broken = bool(error) and re.compile(begins).match(text, begin)
        if is_marked or is_broken or any(arguments_key in one or one[name_key] in [*self._schemas] for one in named):
            calls, call_ids, _ = self._read(text, begin)
            if not error and text[end:].strip():
                calls = [WrongCall(calls[0].name, "no text may stand behind a call, and a turn makes one call")]
            yield CallPart(start, len(text), calls, call_ids)

    def _read(self, text: str, start: int) -> tuple[list[ToolCall | WrongCall], list[Any], int]:
        """Read what is called behind an opening; return the calls, their ids, and the position behind them."""
        opening, closing, separator = self._format[:3]
        limit = text.find(opening, start) if opening else -1
        limit = len(text) if limit < 0 else limit
        begin, name = start, ""
        if separator is not None:
            begin = text.find(separator, start)
            name = text[start : begin if begin >= 0 else limit].strip().partition("\n")[0]
            if not start <= begin < limit:
                return [WrongCall(name, f"{separator} must stand behind the name of a tool")], [None], limit
            begin += len(separator)
        value, end, error = _parse(text, begin)
        if error:
            stop = text.find(closing, start, limit) if closing else -1
            return [WrongCall(name, error)], [None], stop + len(closing) if stop >= 0 else limit
        ids = [item.get(self._format.id_key) if isinstance(item, dict) else None for item in _items(value)]
        calls = [self._checked(name, value)] if separator is not None else [self._call(one) for one in _items(value)]
        if not closing:
            return calls, ids, end
        if not text.startswith(closing, _spaces(text, end)):
            return [WrongCall(calls[0].name, f"{closing} must stand behind the JSON of a call")], ids[:1], end
        return calls, ids, _spaces(text, end) + len(closing)

    def _call(self, item: Any) -> ToolCall | WrongCall:
        """Check a JSON value that should name a tool and its arguments."""
        name_key, arguments_key = self._format.name_key, self._format.arguments_key
        name = item.get(name_key) if isinstance(item, dict) else None
        if not isinstance(name, str):
            return WrongCall("", f'a call must be a JSON object with "{name_key}" and "{arguments_key}"')
        if arguments_key not in item:
            return WrongCall(name, f'the call of {_quoted(name)} has no "{arguments_key}"')
        return self._checked(name, item[arguments_key])

    def _checked(self, name: str, arguments: Any) -> ToolCall | WrongCall:
        """Check a call against the schemas: an existing tool, its required arguments, and no others."""
        if name not in self._schemas:
            return WrongCall(name, f"there is no tool {_quoted(name)}; the tools are {', '.join(self._schemas)}")
        if not isinstance(arguments, dict):
            return WrongCall(name, f"the arguments of {name} must be a JSON object")
        schema = self._schemas[name]
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        problems = [f"the argument {_quoted(one)} is missing" for one in required if one not in arguments]
        if not schema.get("additionalProperties"):
            unknown = [_quoted(one) for one in arguments if one not in properties]
            problems += [f"there is no argument {one}" for one in unknown]
            problems += [f"the arguments are {', '.join(properties) or 'none'}"] if unknown else []
        return WrongCall(name, f"{name}: {'; '.join(problems)}") if problems else ToolCall(name, arguments)


def _parse(text: str, start: int) -> tuple[Any, int, str]:
    """Parse the JSON value at `start`; return it, the position behind it, and "" or what is wrong in one line."""
    begin = _spaces(text, start)
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
        if _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        reason = error.msg.rstrip(": ").removesuffix(" at")
        return None, begin, f"the call is no valid JSON: {reason} at character {error.pos - begin}"
    except RecursionError:
        return None, begin, f"the call nests more than {MAX_DEPTH} levels"
    except UnicodeEncodeError:
        return None, begin, "the call is no valid Unicode: it has one half of a surrogate pair"
    except ValueError as error:  # a number that JSON does not have, or one with too many digits
        return None, begin, f"the call is no valid JSON: {error}"
    return value, end, ""


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(one, levels - 1) for one in inner)


def _items(value: Any) -> list[Any]:
    """Return the calls that a JSON value holds: those of a list, or itself."""
    return value if isinstance(value, list) and value else [value]


def _spaces(text: str, start: int) -> int:
    """Return the position of the first character that is no white space."""
    match = SPACE.match(text, start)
    return match.end() if match else start


def _behind(text: str, part: str, start: int) -> int:
    """Return the position behind the first `part`, or the end of the text if it has none."""
    position = text.find(part, start)
    return position + len(part) if position >= 0 else len(text)


def _quoted(name: str) -> str:
    return repr(name[:MAX_QUOTED_CHARS])
