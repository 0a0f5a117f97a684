"""Calls in sampled text: valid ones by the template's own format, and what a model is told of others."""

from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.tool_templates import (
    HERMES,
    LISTED_TOOLS,
    TOOLS,
    ids_after,
    named_tokenizer,
    sampled_calls,
    tool_tokenizer,
)
from transformers import PreTrainedTokenizerBase

from pipeline.data.tool_calls import ToolCall, WrongCall
from pipeline.data.tool_turns import ToolTurns

CITY, HOUR = ToolCall("weather", {"city": "Paris"}), ToolCall("clock", {})
# A turn that calls consists of JSON, as of Llama's; it needs no package.
BARE = (
    LISTED_TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Hermes', but with one call in a turn.
SINGLE = HERMES.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
# All calls of a turn stand in one more pair of tags, as DeepSeek's do.
WRAPPED = HERMES.replace("{% for call in", "{{ '\n<calls>' if m.tool_calls }}{% for call in").replace(
    "{% endfor %}{{ '<|im_end|>", "{% endfor %}{{ '\n</calls>' if m.tool_calls }}{{ '<|im_end|>"
)
OWN = {"bare": BARE, "single": SINGLE, "wrapped": WRAPPED}
FORMATS = (*OWN, "hermes", "mistral", "named", "thoughtful")


@pytest.fixture(scope="module")
def readers(real_data: Path) -> dict[str, ToolTurns]:
    folder = real_data / "tokenizers"
    own = {name: tool_tokenizer(folder, template, "<|im_end|>") for name, template in OWN.items()}
    return {name: ToolTurns(own.get(name) or named_tokenizer(folder, name), TOOLS) for name in FORMATS}


def ids_of(turns: ToolTurns, text: str) -> list[int]:
    tokenizer: PreTrainedTokenizerBase = turns._tokenizer
    return ids_after(tokenizer, text + tokenizer.eos_token)


def calls(turns: ToolTurns, text: str) -> list[Any]:
    return turns.read(ids_of(turns, text)).calls


def problem(turns: ToolTurns, text: str) -> tuple[str, str]:
    """Return the name and the problem of the one wrong call of a turn."""
    (call,) = calls(turns, text)
    assert isinstance(call, WrongCall) and len(call.problem.splitlines()) == 1
    return call.name, call.problem


def tagged(json: str) -> str:
    return f"<tool_call>\n{json}\n</tool_call>"


CLOCK = '{"name": "clock", "arguments": {}}'
GOOD = {
    "hermes": [
        ("", []),
        ("It is warm. {}", []),
        (tagged('{"name": "weather", "arguments": {"city": "Paris"}}'), [CITY]),
        # In any order and on any lines, with text around.
        ('Hm.<tool_call>{"arguments":{"city":\n"Paris"},"name":"weather"}</tool_call> Done.', [CITY]),
        (tagged('{"name": "clock", "arguments": {}}') * 2 + tagged('{"name": "clock", "arguments": {}}'), [HOUR] * 3),
        (
            tagged('{"name": "weather", "arguments": {"city": "</tool_call> <tool_call> <think>"}}'),
            [ToolCall("weather", {"city": "</tool_call> <tool_call> <think>"})],
        ),
        ("<think>\n<tool_call>\n{</tool_call>\n</think>\n" + tagged('{"name": "clock", "arguments": {}}'), [HOUR]),
        ("Hm. <think><tool_call></think><think><tool_call>", []),
        ("<think>" + tagged('{"name": "clock", "arguments": {}}'), []),
    ],
    "thoughtful": [
        (tagged('{"name": "clock", "arguments": {}}'), []),
        ("Hm. <tool_call></think>" + tagged('{"name": "clock", "arguments": {}}'), [HOUR]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', [CITY]),
        ('Hm.[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]', [HOUR, HOUR]),
        ('[TOOL_CALLS] {"name": "clock", "arguments": {}}', [HOUR]),
        ('[{"name": "clock", "arguments": {}}]', []),
    ],
    "named": [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', [CITY]),
        ('Hm.[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]weather[ARGS] {"city": "Paris"}', [HOUR, CITY]),
        ("clock[ARGS]{}", []),
    ],
    "bare": [
        ("It is warm.", []),
        ('{"name": "weather", "parameters": {"city": "Paris"}}', [CITY]),
        ('<|python_tag|>{"type": "function", "name": "clock", "parameters": {}}\n', [HOUR]),
        ('<think>{"name": </think>\n{"parameters": {}, "name": "clock"}', [HOUR]),
        # JSON that calls nothing is an answer.
        ('{"name": "Bob", "age": 3}', []),
        ('["a"]', []),
        ("{}", []),
        ("{ an open brace", []),
        ('See {"name": "clock", "parameters": {}}', []),
    ],
    "single": [(tagged('{"name": "clock", "arguments": {}}'), [HOUR])],
    "wrapped": [
        (f"<calls>\n{tagged(CLOCK)}\n</calls>", [HOUR]),
        (f"<calls>\n{tagged(CLOCK)}\n{tagged(CLOCK)}\n</calls>", [HOUR, HOUR]),
    ],
}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, texts in GOOD.items() for n in range(len(texts))])
def test_valid_calls_are_read_in_the_format_of_the_template(
    readers: dict[str, ToolTurns], name: str, number: int
) -> None:
    text, expected = GOOD[name][number]
    assert calls(readers[name], text) == expected


JSON = "the call is no valid JSON"
NUMBERED = '{"name": "weather", "arguments": {"city": '
WRONG = {
    "hermes": [
        ("<tool_call>\n{'name': 1}\n</tool_call>", "", f"{JSON} ... double quotes ... character 1"),
        (tagged('{"name": "clock" "arguments": {}}'), "", f"{JSON} ... ',' delimiter at character 17"),
        (tagged('{"name": "clo\nck", "arguments": {}}'), "", f"{JSON} ... Invalid control character at character 13"),
        ("<tool_call></tool_call>", "", f"{JSON} ... Expecting value at character 0"),
        (tagged(NUMBERED + "NaN}}"), "", f"{JSON} ... not JSON compliant"),
        (tagged(NUMBERED + "1e999}}"), "", f"{JSON} ... not JSON compliant"),
        (tagged(NUMBERED + "1" * 5000 + "}}"), "", f"{JSON} ... 4300 digits"),
        (tagged(NUMBERED + "[" * 70 + "]" * 70 + "}}"), "", "nests more than 64 levels"),
        (tagged("[" * 3000), "", "nests more than 64 levels"),
        (tagged(NUMBERED + r'"\ud800"}}'), "", "no valid Unicode"),
        ('<tool_call>\n{"name": "clock", "arguments": {}}', "clock", "</tool_call> must stand behind"),
        ('<tool_call>\n{"name": "clock", "arguments": {}} {}\n</tool_call>', "clock", "</tool_call> must stand behind"),
        ("<tool_call>", "", f"{JSON} ... Expecting value at character 0"),
        (tagged("1"), "", 'JSON object with "name" and "arguments"'),
        (tagged('["clock"]'), "", 'JSON object with "name" and "arguments"'),
        (tagged('{"name": 1, "arguments": {}}'), "", 'JSON object with "name" and "arguments"'),
        (tagged('{"arguments": {}}'), "", 'JSON object with "name" and "arguments"'),
        (tagged('{"name": "clock"}'), "clock", "'clock' has no \"arguments\""),
        (tagged('{"name": "clock", "parameters": {}}'), "clock", "'clock' has no \"arguments\""),
        (tagged('{"name": "Clock", "arguments": {}}'), "Clock", "no tool 'Clock' ... weather, clock"),
        (tagged(r'{"name": "a\nb", "arguments": {}}'), "a\nb", r"no tool 'a\nb' ... weather, clock"),
        (tagged('{"name": "clock", "arguments": []}'), "clock", "arguments of clock must be a JSON object"),
        (tagged('{"name": "clock", "arguments": "{}"}'), "clock", "arguments of clock must be a JSON object"),
        (tagged('{"name": "clock", "arguments": null}'), "clock", "arguments of clock must be a JSON object"),
        (tagged('{"name": "weather", "arguments": {}}'), "weather", "weather ... argument 'city' is missing"),
        (
            tagged('{"name": "weather", "arguments": {"town": "Paris", "a\\nb": 1}}'),
            "weather",
            r"'city' is missing ... no argument 'town' ... no argument 'a\nb' ... the arguments are city, unit",
        ),
        (tagged('{"name": "clock", "arguments": {"zone": 1}}'), "clock", "no argument 'zone' ... arguments are none"),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "clock", "arguments": {}}', "", f"{JSON} ... ',' delimiter"),
        ("[TOOL_CALLS] []", "", 'JSON object with "name" and "arguments"'),
        ("[TOOL_CALLS] clock()", "", f"{JSON} ... Expecting value at character 0"),
    ],
    "named": [
        ("[TOOL_CALLS]clock", "clock", "[ARGS] must stand behind the name"),
        ("[TOOL_CALLS]clock[ARGS]{", "clock", JSON),
        ("[TOOL_CALLS]clock[ARGS]1", "clock", "arguments of clock must be a JSON object"),
        ("[TOOL_CALLS]watch[ARGS]{}", "watch", "no tool 'watch'"),
    ],
    "bare": [
        ('{"name": "clock", "parameters": {}', "", f"{JSON} ... ',' delimiter"),
        ('{"type": "function", "name": "clock", ', "", JSON),
        ('{"name": "watch", "parameters": {}}', "watch", "no tool 'watch'"),
        ('{"name": "clock"}', "clock", "'clock' has no \"parameters\""),
        ('<|python_tag|>clock.call(zone="x")', "", f"{JSON} ... Expecting value at character 0"),
        ('<|python_tag|>{"a": 1}', "", 'JSON object with "name" and "parameters"'),
        ('{"name": "clock", "parameters": {}} There.', "clock", "no text may stand behind a call"),
        ('{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}', "clock", "a turn makes one call"),
        ('[{"name": "clock", "parameters": {}}, {"name": "clock", "parameters": {}}]', "clock", "a turn makes one"),
    ],
    "single": [(tagged('{"name": "clock", "arguments": {}}') * 2, "clock", "a turn makes one call")],
}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, texts in WRONG.items() for n in range(len(texts))])
def test_a_wrong_call_says_in_one_line_what_is_wrong(readers: dict[str, ToolTurns], name: str, number: int) -> None:
    text, called, expected = WRONG[name][number]
    assert problem(readers[name], text) == (called, naming(expected))


def test_a_wrong_call_takes_no_other_call_with_it(readers: dict[str, ToolTurns]) -> None:
    """Whether it is closed or not; and each has its result."""
    good = tagged('{"name": "clock", "arguments": {}}')
    for wrong in (tagged('{"name": '), '<tool_call>{"name": ', '<tool_call>{"name": "clock", "arguments": {}}'):
        first, second, third = calls(readers["hermes"], good + wrong + good)
        assert first == third == HOUR and isinstance(second, WrongCall)
    item = '{"name": "clock", "arguments": {}}'
    first, second = calls(readers["mistral"], f'[TOOL_CALLS] [{{"name": "watch", "arguments": {{}}}}, {item}]')
    assert second == HOUR and isinstance(first, WrongCall)
    first, second, third = calls(
        readers["named"], "[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]clock[TOOL_CALLS]clock[ARGS]{}"
    )
    assert first == third == HOUR and isinstance(second, WrongCall)


def test_a_turn_is_a_message_with_what_it_calls_and_all_other_text(readers: dict[str, ToolTurns]) -> None:
    turns = readers["hermes"]
    good, wrong = tagged('{"name": "weather", "arguments": {"city": "Paris"}}'), tagged('{"name": ')
    function = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    answer = {"role": "assistant", "content": " It is warm. "}
    assert turns.read(ids_of(turns, " It is warm. ")).message == answer
    assert turns.read(ids_of(turns, wrong)).message == {"role": "assistant", "content": wrong}
    for text, content in (
        (good, ""),
        (f"<think>{wrong}</think>\nHm.\n{good}\n", f"<think>{wrong}</think>\nHm."),
        (f"Hm. {good} {wrong}", f"Hm.  {wrong}"),
        (f"<|im_start|>Hm.{good}", "Hm."),
    ):
        expected = {"role": "assistant", "content": content, "tool_calls": [function]}
        assert turns.read(ids_of(turns, text)).message == expected
    twice = turns.read(ids_of(turns, good + "\n" + good)).message
    assert twice == {"role": "assistant", "content": "", "tool_calls": [function] * 2}


def test_a_truncated_turn_has_no_end_token_and_is_read_as_it_is(readers: dict[str, ToolTurns]) -> None:
    for name, text in (
        ("hermes", sampled_calls("hermes", [("clock", {})])),
        ("bare", '{"name": "clock", "parameters": {}}'),
    ):
        ids = ids_of(readers[name], text)[:-1]
        assert readers[name].read(ids).calls == [HOUR]
        (wrong,) = readers[name].read(ids[:-1]).calls
        assert isinstance(wrong, WrongCall)
    assert readers["hermes"].read([]).calls == [] == readers["bare"].read([]).calls


def test_schemas_may_be_flat_and_allow_other_arguments(real_data: Path) -> None:
    flat = [{"name": "note", "parameters": {"type": "object", "properties": {}, "additionalProperties": True}}]
    made = tool_tokenizer(real_data / "tokenizers", HERMES, "<|im_end|>")
    turns = ToolTurns(made, [*flat, {"name": "clock"}])
    text = tagged('{"name": "note", "arguments": {"a": 1}}') + tagged('{"name": "clock", "arguments": {}}')
    assert calls(turns, text) == [ToolCall("note", {"a": 1}), HOUR]
