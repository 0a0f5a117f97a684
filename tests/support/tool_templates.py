"""Chat templates with tools, tokenizers that have them, and the texts that their models sample."""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import GPT2TokenizerFast, LlamaTokenizerFast, PreTrainedTokenizerBase

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
LISTED_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
# As Hermes 2 Pro's: a turn of its own for each result.
HERMES = (
    LISTED_TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if m.role == 'tool' %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% elif m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral 7B v0.3's: calls are one list, and have ids of nine characters, which results repeat.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{ (call.function | tojson)[:-1] }}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    ', "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% else %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% endif %}{% endfor %}"
)
# As Mistral Small 3.2's: names stand outside of JSON. A result repeats the name, as Hermes 2 Pro's do.
NAMED = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.name }}: {{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
# As that of Qwen 3's thinking models: the generation prompt opens the thoughts, which later turns are rendered without.
THOUGHTFUL = HERMES.replace("'\n' + m.content }}", "'\n' + m.content.split('</think>')[-1] }}")
THOUGHTFUL = THOUGHTFUL.replace("assistant\n'", "assistant\n<think>\n'")
# Templates written here, by name, and the token that ends turns.
WRITTEN = {
    "hermes": (HERMES, "<|im_end|>"),
    "mistral": (MISTRAL, "</s>"),
    "named": (NAMED, "</s>"),
    "thoughtful": (THOUGHTFUL, "<|im_end|>"),
}
# Templates of TRL's package whose calls are read.
PUBLISHED = {
    **dict.fromkeys(("llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(
        (
            "qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "qwen3_vl", "qwen3_vl_training",
            "qwen3_instruct_2507", "qwen3_instruct_2507_training",
        ),
        "<|im_end|>",
    ),
}  # fmt: skip
SPECIAL = re.compile(r"<\|\w+\|>|<(?:start|end)_of_turn>|<｜[^｜]*｜>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_\w+|ARGS)\]")
# The tokens of these that are no special ones in their models' tokenizers.
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def published_template(name: str) -> str:
    """Return a template of TRL's package; skip the test where it is not here."""
    found = importlib.util.find_spec("trl")
    folder = Path(next(iter(found.submodule_search_locations))) if found else Path("-")
    path = folder / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"TRL is not installed, whose package has the template {name}")
    return path.read_text(encoding="utf-8")


def tool_tokenizer(folder: Path, template: str, end: str, name: str = "") -> PreTrainedTokenizerBase:
    """Return GPT-2's tokenizer from the folder of tokenizers, with a template and its special tokens."""
    tokenizer = GPT2TokenizerFast.from_pretrained(folder / "gpt2", bos_token="<s>", eos_token=end)
    return with_template(tokenizer, template, name)


def sentencepiece_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Return Mistral's first tokenizer, which puts a space in front of a text, with a template of WRITTEN."""
    template, end = WRITTEN[name]
    tokenizer = LlamaTokenizerFast.from_pretrained(folder / "mistral-v1", eos_token=end)
    return with_template(tokenizer, template, name)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str, name: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template, tokenizer.name_or_path = template, name
    tokenizer.add_tokens([tag for tag in TAGS if tag in template])
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(template)})})
    if name.startswith("llama"):  # GPT-2's joins two line ends, but not before a brace; Llama's splits behind both
        lines = pre_tokenizers.Split(Regex("\n"), behavior="isolated")
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([lines, backend.pre_tokenizer])
    return tokenizer


def named_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a template of WRITTEN or PUBLISHED; 'sentencepiece mistral' and others: of another."""
    if name.startswith("sentencepiece"):
        return sentencepiece_tokenizer(folder, name.split()[1])
    template, end = WRITTEN[name] if name in WRITTEN else (published_template(name), PUBLISHED[name])
    return tool_tokenizer(folder, template, end, name)


def sampled_calls(name: str, calls: Sequence[tuple[str, Mapping[str, Any]]], content: str = "") -> str:
    """Return the text that a model samples to call tools, without its end token, as its family writes it."""
    texts = [(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in calls]
    if name.startswith("llama"):
        ((tool, arguments),) = texts
        return f'{{"name": "{tool}", "parameters": {arguments}}}'
    if name == "mistral":
        items = [
            f'{{"name": "{tool}", "arguments": {arguments}, "id": "{call_id(number)}"}}'
            for number, (tool, arguments) in enumerate(texts)
        ]
        return f"[TOOL_CALLS] [{', '.join(items)}]"
    if name == "named":
        return content + "".join(f"[TOOL_CALLS]{tool}[ARGS]{arguments}" for tool, arguments in texts)
    blocks = [f'<tool_call>\n{{"name": "{tool}", "arguments": {text}}}\n</tool_call>' for tool, text in texts]
    return content + ("\n" if content else "") + "\n".join(blocks)


def call_id(number: int) -> str:
    """Return the id that the model gives its call of this number."""
    return f"sampled{number:02d}"


def ids_after(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text as it stands behind a special token."""
    return tokenizer(tokenizer.eos_token + text, add_special_tokens=False)["input_ids"][1:]
