"""--chat-template-kwargs: what transformers renders with these arguments, the saved template renders by itself."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from input_calls import call, stage_words
from jinja2 import meta
from support.messages import naming
from support.row_options import load_rows
from support.tiny_run import make_folder
from transformers import AutoTokenizer, GPT2TokenizerFast, PreTrainedTokenizerBase

from pipeline.configuration.flags import parse
from pipeline.configuration.resume_rules import differences, record_of
from pipeline.data.cache import cache_key, load
from pipeline.data.selection import DataOptions
from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.inference.answers import load_chat_tokenizer
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.models.tokenizers import load_tokenizer, set_template_values, template_values
from pipeline.rewards.reward_model import separate_tokenizer
from step1_sft.config import SFTConfig

# Qwen3's: an empty thought before the last answer, in the generation prompt only if told so. And gpt-oss's effort.
SWITCHED = (
    "\n{{- 'effort ' + reasoning_effort | default('none') | string }}\n"
    "{%- for m in messages %}\n    {{- m.role + ': ' }}\n"
    "    {%- if m.role == 'assistant' and loop.last %}{{- '<think></think>' }}{%- endif %}\n"
    "    {{- m.content + eos_token }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- 'assistant: ' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}\n"
    "{%- endif %}\n"
)
# Blanks and line ends where trim_blocks and lstrip_blocks act on them, a macro, a loop, and marks of what is trained.
TEMPLATES = {
    "switched": SWITCHED,
    "blanks": "   {% if enable_thinking is defined %}\n  [{{ enable_thinking }}]\n   {% endif %}\n" + SWITCHED,
    "macro": "{% macro f() %}{{ enable_thinking }}{% endmacro %}{% for m in messages %}{{ f() }}{{ m.content }}"
    "{% if loop.last %}{{ reasoning_effort }}{% break %}{% endif %}{% endfor %}",
    "marked": SWITCHED.replace("{{- m.content + eos_token }}", "{% generation %}{{ m.content }}{%- endgeneration -%}"),
}
TURNS = [Message("user", "How?"), Message("assistant", "So."), Message("user", "And then?"), Message("assistant", "x")]
VALUES: list[tuple[str, Any]] = [
    ("false", False), ("true", True), ("null", None), ("high", "high"), ('"false"', "false"), ("-1.5", -1.5),
    ('[1, {"a": null}]', [1, {"a": None}]), ("it's \"%}\" \\n {{ x }} \u00e9\U0001f600", None), ("NaN", "NaN"),
    ("1e999", "1e999"), ("", ""), ("a=b", "a=b"), ("[" * 10_000, "[" * 10_000),
]  # fmt: skip


@pytest.fixture
def tokenizer(bpe_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    bpe_tokenizer.chat_template = SWITCHED
    return bpe_tokenizer


def rendered(tokenizer: PreTrainedTokenizerBase, number: int, **kwargs: Any) -> str:
    """The first turns as transformers renders them, before an answer with the generation prompt."""
    turns = [{"role": turn.role, "content": turn.content} for turn in TURNS[:number]]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=number % 2 == 1, **kwargs)


def assert_given_by_itself(tokenizer: PreTrainedTokenizerBase, words: list[str], kwargs: dict[str, Any]) -> None:
    """As with arguments of the call, of which others still win; servers find the names where they look for them."""
    plain, numbers = tokenizer.chat_template, range(1, len(TURNS) + 1)
    expected = [rendered(tokenizer, number, **kwargs) for number in numbers]
    others = dict.fromkeys(kwargs, "other")
    with_others = [rendered(tokenizer, number, **others) for number in numbers]
    set_template_values(tokenizer, template_values(words), all_of=True)
    assert [rendered(tokenizer, number) for number in numbers] == expected
    assert [rendered(tokenizer, number, **others) for number in numbers] == with_others
    parse_only = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    without_marks = re.sub(r"\{%-? *\w*generation *-?%\}", "", tokenizer.chat_template)
    assert meta.find_undeclared_variables(parse_only.parse(without_marks)) >= kwargs.keys()  # as vLLM looks for them
    assert tokenizer.chat_template.endswith(plain)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_what_transformers_does_with_the_arguments(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    before = rendered(tokenizer, 3)
    words = ["reasoning_effort=high", "enable_thinking=false"]
    assert_given_by_itself(tokenizer, words, {"enable_thinking": False, "reasoning_effort": "high"})
    assert rendered(tokenizer, 3) != before


@pytest.mark.parametrize(("text", "value"), VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_a_value_is_json_or_else_text(text: str, value: Any, tokenizer: Any) -> None:
    value = text if text[:2] == "it" else value
    assert template_values([f"reasoning_effort={text}"]) == {"reasoning_effort": value}
    assert_given_by_itself(tokenizer, [f"reasoning_effort={text}"], {"reasoning_effort": value})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_training", "qwen3_5_think", "gptoss", "glm4moe", "gemma4"])
def test_published_templates(family: str, real_data: Path) -> None:
    if (found := importlib.util.find_spec("trl")) is None:
        pytest.skip("TRL is not installed, whose package has published templates")
    made = GPT2TokenizerFast.from_pretrained(real_data / "tokenizers" / "gpt2")
    (package,) = map(Path, found.submodule_search_locations or ())
    made.chat_template = (package / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    before = rendered(made, 3)
    if family == "gptoss":
        assert_given_by_itself(made, ["reasoning_effort=high"], {"reasoning_effort": "high"})
    else:
        assert_given_by_itself(made, ["enable_thinking=false"], {"enable_thinking": False})
    if family.startswith("qwen3"):
        assert (
            rendered(made, 3).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") and rendered(made, 3) != before
        )


def test_a_later_stage_puts_no_second_line_and_replaces_a_value(tokenizer: Any, tmp_path: Path) -> None:
    for words in (["reasoning_effort=low", "enable_thinking=false"], ["enable_thinking=false"], []):
        set_template_values(tokenizer, template_values(words), all_of=True)
        assert tokenizer.chat_template.count("is not defined") == 2
        tokenizer.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    first = tokenizer.chat_template
    set_template_values(tokenizer, {"enable_thinking": True}, all_of=True)
    assert tokenizer.chat_template == first.replace("enable_thinking = false", "enable_thinking = true") != first


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["enable_thinkin=1"], "enable_thinkin ... not read it ... enable_thinking?"),
        (["messages=1"], "messages ... not read it ... enable_thinking, reasoning_effort"),
        (["eos_token=x"], "eos_token ... not read it"),
        (["enable_thinking"], "'enable_thinking' ... enable_thinking=false"),
        (["=1"], "'=1'"),
        (["a b=1"], "'a b=1'"),
        (["a=1", "a=2"], "got a twice"),
        (["reasoning_effort=null"], "the chat template ... unknown effort"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_line(words: list[str], line: str, tokenizer: Any) -> None:
    tokenizer.chat_template = SWITCHED + (
        "{% if reasoning_effort is none %}{{ raise_exception('unknown effort') }}{% endif %}"
    )
    with pytest.raises(InputError, match=naming("--chat-template-kwargs", line)):
        set_template_values(tokenizer, template_values(words), all_of=True)


def test_without_the_flag_templates_caches_and_checkpoints_are_as_before(
    bpe_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q {n}", "chosen": "a"}) + "\n" for n in range(9))
    )
    options = DataOptions(data_path=(str(tmp_path / "rows.jsonl"),), cache_dir=str(tmp_path / "cache"))
    before, key = tokenizer.chat_template, cache_key(options, tokenizer)
    set_template_values(tokenizer, template_values([]), all_of=True)
    assert tokenizer.chat_template == before and cache_key(options, tokenizer) == key
    plain = load_rows("ppo", options, tokenizer)
    set_template_values(tokenizer, template_values(["enable_thinking=false"]), all_of=True)
    assert cache_key(options, tokenizer) != key, "other rows have another key"
    switched = load_rows("ppo", options, tokenizer)
    texts = [[tokenizer.decode(row["prompt_ids"]) for row in rows.train] for rows in (plain, switched)]
    assert texts[0] and [f"{text}<think></think>" for text in texts[0]] == texts[1]
    config = parse(SFTConfig, [], section="sft").config
    saved = record_of(config, 1, "same")
    del saved["settings"]["chat_template_kwargs"]  # as an earlier version wrote it
    for words, number in (([], 0), (["none"], 0), (["enable_thinking=false"], 1)):
        asked = parse(SFTConfig, ["--chat-template-kwargs", *words] if words else [], section="sft").config
        found = list(differences(saved, record_of(asked, 1, "same"), asked))
        assert len(found) == number and all(line.startswith("--chat-template-kwargs: got") for line in found)


@pytest.mark.parametrize(("template", "is_apart"), [(SWITCHED, False), ("{{ messages[0].content }}", True)])
def test_a_reward_model_gets_the_values_that_its_own_template_reads(
    template: str, is_apart: bool, tiny_folders: dict[str, str], tokenizer: Any, tmp_path: Path
) -> None:
    reward = load_tokenizer(tiny_folders["opt-reward"])
    reward.chat_template = template
    reward.save_pretrained(tmp_path)
    words = ["enable_thinking=false"]
    set_template_values(tokenizer, template_values(words), all_of=True)
    found = separate_tokenizer(ModelSource(str(tmp_path)), tokenizer, "auto", words)
    assert (found.chat_template if found else None) == (template if is_apart else None)


def test_stage_1_trains_with_it_saves_it_and_chat_renders_the_same(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    base = AutoTokenizer.from_pretrained(folder / "base")
    base.chat_template = SWITCHED
    base.save_pretrained(folder / "base")
    flags = {"per_device_train_batch_size": 4}
    for name, words in (("plain", None), ("switched", ["enable_thinking=false"])):
        ending = call("sft", stage_words("sft", folder, tmp_path / name, chat_template_kwargs=words, **flags))
        assert ending.code == 0, ending.stderr
        (rows,) = (tmp_path / name / "cache").glob("sequences-0-*/train.arrow")
        trained = [
            [i for i, is_trained in zip(row["ids"], row["trained"], strict=True) if is_trained] for row in load(rows)
        ]
        thoughts = [base.decode(ids).startswith("<think></think>It was") for ids in trained]
        assert len(thoughts) == 8 and set(thoughts) == {words is None}, "it is a part of the prompt, or of the answer"
    prompt = [TURNS[0]]
    asked = [{"role": "user", "content": "How?"}]
    expected = base.apply_chat_template(asked, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    saved = str(tmp_path / "switched" / "model")
    assert encode_prompt(load_chat_tokenizer(ModelSource(saved)), prompt) == expected
    assert (Path(saved) / "chat_template.jinja").read_text().endswith(SWITCHED)
    assert (tmp_path / "plain" / "model" / "chat_template.jinja").read_text() == SWITCHED
    assert encode_prompt(prepare_tokenizer(ModelSource(saved), "auto"), prompt) == expected, "a later stage"
    refused = call("sft", stage_words("sft", folder, tmp_path / "wrong", chat_template_kwargs=["enabled=1"], **flags))
    assert refused.code == 2 and len(refused.errors) == 1, refused.stderr
    assert refused.errors[0] == naming("error: --chat-template-kwargs enabled ... the chat template")
