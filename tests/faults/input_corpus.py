"""The malformed inputs of test_input_corpus.py: what is written, which command reads it, and how that has to end.

Three endings: REFUSED is one line and exit 2 that names the file, the row and what was found; COUNTED is a row that is
left out and reported by kind with the place of its first example; TAKEN is a file that is odd and right.
"""

import gzip
import io
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import pyarrow
import pyarrow.parquet

Ending = Literal["REFUSED", "COUNTED", "TAKEN"]
STAGES = ("sft", "reward", "ppo", "dpo")
PROMPTS = [f"Describe the {colour} otter." for colour in ("red", "grey", "white", "brown", "black", "golden")]
GOOD = [{"prompt": text, "chosen": "It was kind.", "rejected": "It was rude."} for text in PROMPTS]
LAST = len(GOOD) + 1  # the row behind the good ones
PAIR = {"prompt": "Who is it?", "chosen": "A heron.", "rejected": "A toad."}


class Case(NamedTuple):
    """One malformed input: the file `name` with `content`, read by `command`; `says` stands in the line at its end."""

    command: str
    name: str
    content: bytes
    ending: Ending
    says: str
    id: str


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@cache
def parquet_of(text: str) -> bytes:
    """The rows of a JSON array as a parquet file."""
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(json.loads(text)), sink)
    return sink.getvalue()


def csv_of(rows: list[dict[str, str]]) -> bytes:
    body = "".join(",".join(f'"{value}"' for value in row.values()) + "\n" for row in rows)
    return (",".join(rows[0]) + "\n" + body).encode()


def replaced(content: bytes, start: int, piece: bytes) -> bytes:
    return content[:start] + piece + content[start + len(piece) :]


def parquet_of_bytes(cell: bytes) -> bytes:
    """One row of prompts as a parquet file, whose text holds these bytes."""
    sizes = pyarrow.py_buffer((0).to_bytes(4, "little") + len(cell).to_bytes(4, "little"))
    column = pyarrow.StringArray.from_buffers(1, sizes, pyarrow.py_buffer(cell))
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "response": ["a"]}), sink)
    return sink.getvalue()


LINES, ARRAY, TABLE = lines_of(GOOD), json.dumps(GOOD).encode(), csv_of(GOOD)
PARQUET = parquet_of(json.dumps(GOOD))
PACKED = gzip.compress(LINES, mtime=0)
HUGE_ROW = gzip.compress(lines_of([{**PAIR, "chosen": "word " * 1_000_001}]), mtime=0)
HUGE_NUMBER = b'{"prompt": ' + b"1" * 5000 + b"}"
LINES_IN_A_CELL = b'"' + b"line\n" * 10 + b'"'
NESTED = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

# name: (content, ending, what the line says; {name} is the file's).
FILES: dict[str, tuple[bytes, Ending, str]] = {
    "empty.jsonl": (b"", "REFUSED", "{name}: no rows"),
    "blank.jsonl": (b"\n  \n\r\n", "REFUSED", "{name}: no rows"),
    "half.jsonl": (LINES[:-20], "REFUSED", "{name}:6: broken JSON"),
    "bom.jsonl": (b"\xef\xbb\xbf" + LINES, "TAKEN", "6 to train on"),
    "crlf.jsonl": (LINES.replace(b"\n", b"\r\n"), "TAKEN", "6 to train on"),
    "blank-between.jsonl": (LINES.replace(b"\n", b"\n\n"), "TAKEN", "6 to train on"),
    "UPPER.JSONL": (LINES, "TAKEN", "6 to train on"),
    "cr.jsonl": (LINES.replace(b"\n", b"\r"), "REFUSED", "{name}:1: broken JSON"),
    "utf16.jsonl": (LINES.decode().encode("utf-16"), "REFUSED", "{name}:1: byte 1 is not UTF-8"),
    "latin.jsonl": (LINES + b'{"prompt": "\xe9"}', "REFUSED", "{name}:7: byte 13 is not UTF-8"),
    "nul.jsonl": (LINES + b'{"prompt": "a\0"}', "REFUSED", "{name}:7: broken JSON"),
    "zeros.jsonl": (b"\0" * 4096, "REFUSED", "{name}:1: broken JSON"),
    "list.jsonl": (LINES + b"[1, 2]\n", "REFUSED", "{name}:7: got a JSON list"),
    "number.jsonl": (b"5", "REFUSED", "{name}:1: got a JSON int"),
    "string.jsonl": (b'"prompt"', "REFUSED", "{name}:1: got a JSON str"),
    "null.jsonl": (LINES + b"null", "REFUSED", "{name}:7: got a JSON NoneType"),
    "nested.jsonl": (NESTED, "REFUSED", "{name}:1: broken JSON"),
    "number-of-5000-digits.jsonl": (HUGE_NUMBER, "REFUSED", "{name}:1: broken JSON"),
    "comma.jsonl": (LINES + b'{"prompt": "a",}', "REFUSED", "{name}:7: broken JSON"),
    "one-line.jsonl": (LINES.replace(b"\n", b""), "REFUSED", "{name}:1: broken JSON (Extra data"),
    "python.jsonl": (b"{'prompt': 'a'}", "REFUSED", "{name}:1: broken JSON"),
    "field-twice.jsonl": (LINES + b'{"prompt": 1, "prompt": 2}', "REFUSED", "{name}:7: broken JSON (the field"),
    "no-fields.jsonl": (b"{}\n{}", "REFUSED", "{name}:1: columns (none) fit no known format"),
    "nan.jsonl": (b'{"prompt": NaN, "response": "a"}', "REFUSED", "1 dropped: prompt is no text but float (first: "),
    "not-packed.jsonl.gz": (LINES, "REFUSED", "{name}: damaged gzip"),
    "cut.jsonl.gz": (PACKED[:-30], "REFUSED", "{name}: damaged gzip"),
    "tail.jsonl.gz": (PACKED + b"xx", "REFUSED", "{name}: damaged gzip"),
    "checksum.jsonl.gz": (PACKED[:-8] + b"\0" * 8, "REFUSED", "{name}: damaged gzip"),
    "flipped.jsonl.gz": (replaced(PACKED, 40, b"\xff" * 10), "REFUSED", "{name}: damaged gzip"),
    "packed.jsonl.gz": (PACKED, "TAKEN", "6 to train on"),
    "huge-row.jsonl.gz": (PACKED + HUGE_ROW, "COUNTED", "1 dropped: text longer than 5,000,000 characters (first: "),
    "half.json": (ARRAY[:-9], "REFUSED", "{name}: broken JSON"),
    "pretty.json": (json.dumps(GOOD[0], indent=1).encode(), "REFUSED", "{name}:1: broken JSON"),
    "nested.json": (json.dumps([GOOD]).encode(), "REFUSED", "{name}: row 1: got a JSON list"),
    "mixed.json": (json.dumps([*GOOD, None]).encode(), "REFUSED", "{name}: row 7: got a JSON NoneType"),
    "twice.json": (ARRAY * 2, "REFUSED", "{name}: broken JSON (Extra data"),
    "wrapped.json": (json.dumps({"data": GOOD}).encode(), "REFUSED", "{name}:1: columns 'data' fit no known format"),
    "brackets.json": (b"[" * 100_000, "REFUSED", "{name}: broken JSON"),
    "number-of-5000-digits.json": (b"[" + HUGE_NUMBER + b"]", "REFUSED", "{name}: broken JSON"),
    "empty.json": (b"", "REFUSED", "{name}: no rows"),
    "empty-array.json": (b"[]", "REFUSED", "{name}: no rows"),
    "bom.json": (b"\xef\xbb\xbf" + ARRAY, "TAKEN", "6 to train on"),
    "empty.csv": (b"", "REFUSED", "{name}: no rows"),
    "header.csv": (b"prompt,chosen,rejected\n", "REFUSED", "{name}: no rows"),
    "narrow.csv": (TABLE + b"a,b\n", "REFUSED", "{name}:8: the header names 3 columns"),
    "wide.csv": (TABLE + b"a,b,c,d\n", "REFUSED", "{name}:8: the header names 3 columns"),
    "quote.csv": (TABLE + b'"a,b,c\n', "REFUSED", "{name}:8: not a CSV row"),
    "column-twice.csv": (b"prompt,prompt,response\na,b,c\n", "REFUSED", "{name}:1: the column 'prompt' is repeated"),
    "semicolons.csv": (TABLE.replace(b'","', b'";"'), "REFUSED", "{name}:2: not a CSV row"),
    "utf16.csv": (TABLE.decode().encode("utf-16"), "REFUSED", "{name}:1: byte 1 is not UTF-8"),
    "latin.csv": (TABLE + b"\xe9,b,c\n", "REFUSED", "{name}:8: byte 1 is not UTF-8"),
    "nul.csv": (TABLE + b"a\0,b,c\n", "COUNTED", "1 dropped: text holds a NUL character (first: {name}:8)"),
    "no-header.csv": (TABLE.split(b"\n", 1)[1], "REFUSED", "{name}:1: columns 'Describe the red otter.'"),
    "wrong-header.csv": (b"question,best\n" + LINES_IN_A_CELL + b",a\n", "REFUSED", "{name}:1: columns 'question', "),
    "bom.csv": (b"\xef\xbb\xbf" + TABLE, "TAKEN", "6 to train on"),
    "crlf.csv": (TABLE.replace(b"\n", b"\r\n"), "TAKEN", "6 to train on"),
    "half.parquet": (PARQUET[: len(PARQUET) // 2], "REFUSED", "{name}: broken parquet file"),
    "text.parquet": (LINES, "REFUSED", "{name}: broken parquet file"),
    "empty.parquet": (b"", "REFUSED", "{name}: broken parquet file"),
    "no-rows.parquet": (parquet_of("[]"), "REFUSED", "{name}: no rows"),
    "latin.parquet": (parquet_of_bytes(b"\xe9t\xe9"), "REFUSED", "{name}: broken parquet file ('utf-8' codec can't"),
    "magic.parquet": (b"PAR1" + PARQUET[4:-4] + b"XXXX", "REFUSED", "{name}: broken parquet file"),
    "not-packed.parquet.gz": (PARQUET, "REFUSED", "{name}: damaged gzip"),
    "packed.parquet.gz": (gzip.compress(PARQUET), "TAKEN", "6 to train on"),
    "table.xlsx": (b"PK", "REFUSED", "{name}: no data file; .jsonl, .json"),
    "rows.pkl": (b"\x80\x04.", "REFUSED", "{name}: no data file"),
    "rows.pt": (b"PK", "REFUSED", "{name}: no data file"),
    "rows": (LINES, "REFUSED", "{name}: no data file"),
    "rows.jsonl.bz2": (LINES, "REFUSED", "{name}: no data file"),
    "rows.jsonl.zip": (b"PK", "REFUSED", "{name}: no data file"),
}  # fmt: skip
# Plain text is for step 1 and for step 3's ptx loss.
TEXTS: dict[str, tuple[bytes, Ending, str]] = {
    "empty.txt": (b"\n\n", "REFUSED", "{name}: no rows"),
    "zeros.txt": (b"\0\0", "REFUSED", "1 dropped: text holds a NUL character (first: {name}:1)"),
    "latin.txt": (b"a\n\n\xe9", "REFUSED", "{name}:3: byte 1 is not UTF-8"),
    "bom.txt": (b"\xef\xbb\xbfone\n\ntwo", "TAKEN", "2 to train on (sequences: 1)"),
}
NO_PROMPT = "no prompt: chosen is neither a transcript nor a list of messages"
ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LONG = "word " * 100_000


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return {"messages": messages, "chosen": "A heron.", "rejected": "A toad."}


def transcripts(first: str, second: str) -> dict[str, str]:
    """A pair whose sides are whole conversations with these prompts."""
    return {
        side: f"\n\nHuman: {prompt}\n\nAssistant: {side}" for side, prompt in (("chosen", first), ("rejected", second))
    }


def nested_list(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


# A bad row: the kind under which it is counted.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "null prompt": ({**PAIR, "prompt": None}, "prompt is null"),
    "empty prompt": ({**PAIR, "prompt": ""}, "empty prompt"),
    "blank prompt": ({**PAIR, "prompt": " \n\t "}, "empty prompt"),
    "number as prompt": ({**PAIR, "prompt": 5}, "prompt is no text but int"),
    "switch as prompt": ({**PAIR, "prompt": True}, "prompt is no text but bool"),
    "list as prompt": ({**PAIR, "prompt": [["a"]]}, "prompt is no list of messages"),
    "object as prompt": ({**PAIR, "prompt": {"a": 1}}, "prompt is no text but dict"),
    "deep list as prompt": ({**PAIR, "prompt": nested_list(200)}, "prompt is no list of messages"),
    "NUL in prompt": ({**PAIR, "prompt": "a\0b"}, "text holds a NUL character"),
    "NUL in chosen": ({**PAIR, "chosen": "a\0b"}, "text holds a NUL character"),
    "half surrogate": ({**PAIR, "prompt": "a\ud800"}, "text is no valid Unicode"),
    "empty chosen": ({**PAIR, "chosen": ""}, "chosen is empty"),
    "blank chosen": ({**PAIR, "chosen": "\n "}, "chosen is empty"),
    "number as chosen": ({**PAIR, "chosen": 3.5}, "chosen is no text but float"),
    "list as chosen": ({**PAIR, "chosen": ["a"]}, "chosen is no list of messages"),
    "object as chosen": ({**PAIR, "chosen": {"x": 1}}, "chosen has a turn without text"),
    "number as rejected": ({**PAIR, "rejected": 1}, "rejected is no text but int"),
    "empty rejected": ({**PAIR, "rejected": ""}, "rejected is empty"),
    "chosen is rejected": ({**PAIR, "rejected": PAIR["chosen"]}, "chosen equals rejected"),
    "word as margin": ({**PAIR, "margin": "x"}, "margin is no number from -1e+06 to 1e+06"),
    "infinite margin": ({**PAIR, "margin": 1e400}, "margin is no number from -1e+06 to 1e+06"),
    "absurd margin": ({**PAIR, "margin": 1e308}, "margin is no number from -1e+06 to 1e+06"),
    "list as margin": ({**PAIR, "margin": [1]}, "margin is no number from -1e+06 to 1e+06"),
    "unknown role": (turns(("alien", "x")), "messages has a turn whose role is not system, user or assistant"),
    "number as role": (turns((1, "x")), "messages has a turn whose role is not system, user or assistant"),  # type: ignore[arg-type]
    "two users": (turns(("user", "a"), ("user", "b")), "turns do not alternate user, assistant"),
    "empty turn": (turns(("user", "a"), ("assistant", "b"), ("user", "")), "empty turn"),
    "system alone": (turns(("system", "a")), "empty prompt"),
    "null content": (turns(("user", None)), "messages has a turn without text"),
    "text as messages": ({"messages": "hi", "chosen": "a", "rejected": "b"}, "messages is no list of messages"),
    "no messages": ({"messages": [], "chosen": "a", "rejected": "b"}, NO_PROMPT),
    "other prompts": (transcripts("a", "c"), "chosen and rejected have different prompts"),
    "no answer": ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}, "chosen does not end in an assistant turn"),
    "empty instruction": ({"instruction": "", "output": "a"}, "empty prompt"),
    "null instruction": ({"instruction": None, "output": "a"}, "instruction is null"),
    "sharegpt without value": ({"conversations": [{"from": "human"}]}, "conversations has a turn without text"),
    "number as text": ({"text": 3}, "text is no text but int"),
    "blank text": ({"text": " "}, "text is empty"),
}  # fmt: skip
NO_PAIR = "no pair: columns chosen and rejected are needed, with prompt or messages"
# Rows that only some stages leave out, or remark on: (stage, row, what is said).
STAGE_ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "null chosen": ("sft", {**PAIR, "chosen": None}, "dropped: no response to train on"),
    "null rejected": ("reward", {**PAIR, "rejected": None}, f"dropped: {NO_PAIR}"),
    "repeated": ("sft", dict(GOOD[0]), "kept: row repeated"),
    "repeated pair": ("reward", dict(GOOD[0]), "kept: row repeated"),
    "repeated prompt": ("ppo", dict(GOOD[0]), "dropped: prompt repeated"),
    "long answer": ("sft", {**PAIR, "chosen": LONG}, "cut: response beyond max_seq_len"),
    "long pair": ("reward", {**PAIR, "chosen": LONG}, "dropped: pair longer than max_seq_len"),
    "long prompt": ("ppo", {**PAIR, "prompt": LONG}, "dropped: prompt longer than max_prompt_seq_len"),
    "special token": (
        "sft",
        {**PAIR, "prompt": "a</s>b"},
        "kept: text that spells a special token (now with a space in it)",
    ),
    "other columns": ("sft", {"query": "a", "reply": "b"}, "dropped: columns fit no format"),
}
# Whole files in a wrong layout: the columns, and the mapping that the line proposes.
LAYOUTS = {
    "promt,chosen,rejected": "no prompt: chosen is neither",
    "promt,chosn,rejectd": "nearest: --column-map prompt=promt,chosen=chosn,rejected=rejectd",
    "query,reply": "name them with --column-map prompt=...",
    "Prompt,Response": "nearest: --column-map prompt=Prompt,response=Response",
    "instructon,outputs": "nearest: --column-map instruction=instructon,output=outputs",
    "mesages": "nearest: --column-map messages=mesages",
    "id,url": "name them with --column-map prompt=...",
}
# Files of prompts for prompt_eval.
QUESTIONS: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "{name}: no prompt in it"),
    "blank.txt": (b" \n\n", "{name}: no prompt in it"),
    "latin.txt": (b"one\n\xe9", "{name}: cannot be read as UTF-8"),
    "utf16.txt": ("one".encode("utf-16"), "{name}: cannot be read as UTF-8"),
    "zeros.txt": (b"one\n\0\0\n", "{name}:2: text holds a NUL character"),
    "half.jsonl": (b'{"prompt": "a"', "{name}:1: broken JSON"),
    "list.jsonl": (b"[1]", "{name}:1: got a JSON list"),
    "no-column.jsonl": (b'{"question": "a"}', "{name}:1: no `prompt` among the columns question"),
    "typo.jsonl": (b'{"promt": "a"}', "did you mean promt?"),
    "null.jsonl": (b'{"prompt": "a"}\n{"prompt": null}', "{name}:2: prompt is no list of messages"),
    "number.jsonl": (b'{"prompt": 3}', "{name}:1: prompt is no list of messages"),
    "blank.jsonl": (b'{"prompt": "  "}', "{name}:1: empty prompt"),
    "nul.jsonl": (b'{"prompt": "a\\u0000"}', "{name}:1: text holds a NUL character"),
    "role.jsonl": (b'{"prompt": [{"role": "alien", "content": "x"}]}', "{name}:1: prompt has a turn whose role"),
    "answered.jsonl": (lines_of([{"prompt": ANSWERED}]), "{name}:1: the prompt ends with an answer"),
    "digits.jsonl": (HUGE_NUMBER, "{name}:1: broken JSON"),
    "half.json": (b'[{"prompt": "a"}', "{name}: broken JSON"),
    "number.json": (b"[1]", "{name}: row 1: got a JSON int"),
    "long.txt": (b"word " * 1000, "do not fit into the model's 128 positions"),
    "table.csv": (b"prompt\na\n", "{name}: .txt, .json, .jsonl are right"),
    "rows.pkl": (b"x", "{name}: .txt, .json, .jsonl are right"),
    "packed.jsonl.gz": (b"no", "{name}: damaged gzip"),
}  # fmt: skip


def file_cases() -> Iterator[Case]:
    for name, (content, ending, says) in FILES.items():
        for command in STAGES:
            yield Case(command, name, content, ending, says.format(name=name), f"{command}-{name}")
    for name, (content, ending, says) in TEXTS.items():
        yield Case("sft", name, content, ending, says.format(name=name), f"sft-{name}")
    for name in ("empty.jsonl", "half.jsonl", "latin.csv", "half.parquet", "nested.json"):
        content, ending, says = FILES[name]
        yield Case("reward_eval", name, content, ending, says.format(name=name), f"reward_eval-{name}")


def row_cases() -> Iterator[Case]:
    """A bad row behind good ones is counted; a file of bad rows alone is refused with the same words."""
    for number, (label, (row, kind)) in enumerate(ROWS.items()):
        command, name = STAGES[number % len(STAGES)], f"{label.replace(' ', '-')}.jsonl"
        says = f"1 dropped: {kind} (first: {name}:{LAST}"
        yield Case(command, name, lines_of([*GOOD, row]), "COUNTED", says, f"{command}-{label}")
        name = f"all-{name}"
        says = f"no usable row: 2 dropped: {kind} (first: {name}:1"
        yield Case(STAGES[(number + 1) % len(STAGES)], name, lines_of([row, row]), "REFUSED", says, f"only-{label}")
    for label, (command, row, kind) in STAGE_ROWS.items():
        name = f"{label.replace(' ', '-')}.jsonl"
        yield Case(
            command, name, lines_of([*GOOD, row]), "COUNTED", f"1 {kind} (first: {name}:{LAST}", f"{command}-{label}"
        )


def format_cases() -> Iterator[Case]:
    """The same bad rows in the other formats, where these can spell them."""
    for label in ("null prompt", "empty prompt", "blank chosen", "chosen is rejected", "NUL in chosen"):
        row, kind = ROWS[label]
        stem = label.replace(" ", "-")
        array = json.dumps([*GOOD, row])
        yield Case(
            "reward",
            f"{stem}.json",
            array.encode(),
            "COUNTED",
            f"1 dropped: {kind} (first: {stem}.json:{LAST})",
            f"json-{label}",
        )
        packed = parquet_of(array)
        yield Case(
            "reward",
            f"{stem}.parquet",
            packed,
            "COUNTED",
            f"1 dropped: {kind} (first: {stem}.parquet:{LAST})",
            f"parquet-{label}",
        )
        if row["prompt"] is not None:
            table = csv_of([*GOOD, row])
            yield Case("sft", f"{stem}.csv", table, "COUNTED", f"1 dropped: {kind} (first: {stem}.csv:", f"csv-{label}")


def layout_cases() -> Iterator[Case]:
    for command in STAGES:
        for columns, says in LAYOUTS.items():
            name = f"{columns.replace(',', '-')}.jsonl"
            row = dict.fromkeys(columns.split(","), "words")
            row = {column: f"{value} {column}" for column, value in row.items()}
            yield Case(command, name, lines_of([row]), "REFUSED", says, f"{command}-{columns}")


def question_cases() -> Iterator[Case]:
    for name, (content, says) in QUESTIONS.items():
        yield Case("prompt_eval", name, content, "REFUSED", says.format(name=name), f"prompt_eval-{name}")


CASES = [*file_cases(), *row_cases(), *format_cases(), *layout_cases(), *question_cases()]
