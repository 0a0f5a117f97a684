"""Templates and special tokens as models ship them, on published tokenizers: what is trained is what is sampled."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from support.messages import naming
from support.tiny_models import save_tiny
from transformers import AddedToken

from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import Record, read_records
from pipeline.data.row_kinds import PAIRS, PROMPTS, SEQUENCES, TokenizationOptions
from pipeline.data.sources import read_rows
from pipeline.data.templates import encode_conversation, encode_prompt, set_template
from pipeline.data.turns import Message, Turns
from pipeline.errors import InputError
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.models.tokenizers import eos_ids

# The shape of ChatML templates with marks: SmolLM3's hold the end of the turn and a line end, others the content alone.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTENT_MARKED = MARKED.replace(
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>\n"
)
# Reasoning is left out of earlier answers and an empty block put before the last one, as in Qwen3's.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Gemma's: no system turn, roles that must alternate.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Phi-3's: each turn has its end token, and EOS stands behind the last one where no generation prompt does. Its variant
# for training marks both.
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
EOS_BEHIND = UNMARKED.replace("assistant\n{% endif %}", "assistant\n{% else %}{{ eos_token }}{% endif %}")
MARKED_EOS = MARKED.replace(
    "assistant\n{% endif %}", "assistant\n{% else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)
# Qwen2.5's: the tools are a part of the system turn, one on a line.
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Help.' }}{%- endif %}"
    '{{- "\n\n# Tools\n\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}'
    "{{- '\n</tools><|im_end|>\n' }}{%- endif %}" + MARKED
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city </s>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TALK = (
    Message("system", "Be brief."),
    Message("user", "How do I make tea?"),
    Message("assistant", "Boil water."),
    Message("user", "How long?"),
    Message("assistant", "four minutes"),
)


@pytest.fixture
def chatml(real_tokenizer):
    """Each published tokenizer with the two tokens of ChatML, and no BOS."""
    real_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    real_tokenizer.bos_token = None
    return real_tokenizer


def record(turns: Turns, rejected: str | None = None) -> Record:
    return Record(turns[:-1], turns[-1].content, rejected, prompt_id=0, origin=Origin("f", 1), split=None)


def trained_text(tokenizer, encoded) -> str:
    return tokenizer.decode([token for token, flag in zip(encoded.ids, encoded.trained, strict=True) if flag])


def test_marks_of_the_template_are_the_mask_that_transformers_makes_of_them(chatml):
    """Up to the end token of a turn: what a template puts behind it, no sampler ever makes."""
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    for template in (MARKED, TOOLS):
        chatml.chat_template = template
        turns = [{"role": turn.role, "content": turn.content} for turn in TALK]
        theirs = chatml.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        ours = encode_conversation(chatml, TALK)
        num = len(ours.ids)
        assert ours.ids == theirs["input_ids"][:num] and ours.ids[-1] == end
        assert end not in theirs["input_ids"][num:]
        behind = [False, *(token == end for token in ours.ids[:-1])]
        flags = zip(theirs["assistant_masks"][:num], behind, strict=True)
        expected = [bool(flag) and not is_behind for flag, is_behind in flags]
        assert ours.trained == expected and sum(expected) > 4


@pytest.mark.parametrize("template", [EOS_BEHIND, MARKED_EOS])
def test_an_answer_ends_where_a_sampler_stops(chatml, template):
    """At the first end token: what the template puts behind it is neither trained nor scored, and hides no turn."""
    chatml.chat_template = template
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    assert {end, chatml.eos_token_id} == eos_ids(chatml)
    counts = Counts()
    (pair,) = PAIRS.rows([record(TALK[:3], "No.")], chatml, TokenizationOptions(), counts)
    (sft,) = SEQUENCES.rows([record(TALK)], chatml, TokenizationOptions(), counts)
    for ids, turns in ((pair.chosen_ids, TALK[:3]), (sft.ids, TALK)):
        text = chatml.apply_chat_template([asdict(turn) for turn in turns], tokenize=False)
        assert text.endswith("<|im_end|>\n" + chatml.eos_token)
        assert ids == chatml(text.removesuffix("\n" + chatml.eos_token), add_special_tokens=False)["input_ids"]
    for ids in (pair.chosen_ids, pair.rejected_ids):
        assert [token for token in ids[pair.prompt_length :] if token in eos_ids(chatml)] == [end] == ids[-1:]
    assert trained_text(chatml, sft).replace(" ", "") == "Boilwater.<|im_end|>fourminutes<|im_end|>"
    assert counts.lines() == []


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_marks_excuse_no_answer_that_does_not_follow_its_prompt(chatml, template):
    """As DeepSeek-R1's, whose generation prompt opens a block of reasoning that no answer is rendered with."""
    chatml.chat_template = template.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for turns, train_turns in itertools.product((TALK, TALK[:3]), ("all", "last")):
        with pytest.raises(InputError, match=naming("no prompt is a prefix ... --template human_assistant")):
            list(SEQUENCES.rows([record(turns)], chatml, TokenizationOptions(train_turns=train_turns), Counts()))
    with pytest.raises(InputError, match="no prompt is a prefix"):
        list(PAIRS.rows([record(TALK, "No.")], chatml, TokenizationOptions(), Counts()))
    set_template(chatml, "human_assistant")
    assert len(list(SEQUENCES.rows([record(TALK)], chatml, TokenizationOptions(), Counts()))) == 1


def test_a_row_whose_answer_is_rendered_elsewhere_is_dropped_and_counted(chatml):
    """As by Mistral 7B v0.3's: the system turn stands in the last turn, where that is the user's, and nowhere else."""
    chatml.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
        "{{ m.content }}<|im_start|>{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    rows = [record(TALK[:3], "x"), record(TALK[1:3], "x"), record(TALK, "x")]
    for make, others in ((SEQUENCES.rows, 0), (PAIRS.rows, 0), (PROMPTS.rows, 2)):
        counts = Counts()
        assert len(list(make(rows, chatml, TokenizationOptions(), counts))) == 1 + others
        found = naming("2 dropped ... chat template ... behind its prompt (first: f:1)")
        assert counts.lines() == ([] if others else [found])
    assert "Be brief." in chatml.decode(encode_prompt(chatml, TALK[:2]))


def test_marked_answers_that_are_rewritten_later_are_not_trained_and_counted(chatml):
    """The marks hold them, but as they were sampled they stand nowhere."""
    block = "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    chatml.chat_template = MARKED.replace("{% generation %}", "{% generation %}" + block)
    counts = Counts()
    (row,) = SEQUENCES.rows([record(TALK)], chatml, TokenizationOptions(), counts)
    assert counts.lines() == [naming("1 kept ... earlier turns ... only the last ... (first: f:1)")]
    prompt = encode_prompt(chatml, TALK[:-1])
    assert row.ids[: len(prompt)] == prompt and not any(row.trained[: len(prompt)]) and all(row.trained[len(prompt) :])


def test_tokens_never_merge_across_a_prompts_end_where_marks_begin_later(chatml):
    """The first letters of an answer are not marked; with the space in front of them they would be one token."""
    chatml.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content[:3] }}{% generation %}{{ m.content[3:] }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }} A: {% endif %}{% endfor %}"
    )
    turns = (Message("user", "x"), Message("assistant", "the capital"))
    prompt = encode_prompt(chatml, turns[:1])
    whole = chatml.apply_chat_template([asdict(turn) for turn in turns])["input_ids"]
    assert whole[: len(prompt)] != prompt, "the case must be one where the tokenizer merges"
    assert encode_conversation(chatml, turns).ids[: len(prompt)] == prompt


def test_only_what_is_marked_is_trained(chatml):
    """A template may mark less than the answer: here no first word; our own cut would train it."""
    marked = "{{ m.content.split()[0] }}{% generation %}{{ m.content[m.content.split()[0] | length:] }}<|im_end|>"
    chatml.chat_template = MARKED.replace("{% generation %}{{ m.content + '<|im_end|>\n' }}", marked)
    trained = trained_text(chatml, encode_conversation(chatml, TALK)).replace(" ", "")
    assert trained == "water.<|im_end|>minutes<|im_end|>"
    last = encode_conversation(chatml, TALK, "last")
    assert trained_text(chatml, last).replace(" ", "") == "minutes<|im_end|>"
    prompt = encode_prompt(chatml, TALK[:-1])
    assert last.ids[: len(prompt)] == prompt


def test_a_pair_shares_its_prompt_whatever_the_marks_leave_out(chatml):
    """The answers begin with other words that are not marked: they are no part of the prompt."""
    marked = "{{ m.content.split('.')[0] }}{% generation %}{{ m.content[m.content.split('.')[0] | length:] }}<|im_end|>"
    chatml.chat_template = MARKED.replace("{% generation %}{{ m.content + '<|im_end|>\n' }}", marked)
    pair = Record(TALK[:2], "Hm hm. Boil it.", "No. Never.", prompt_id=0, origin=Origin("f", 1), split=None)
    (row,) = PAIRS.rows([pair], chatml, TokenizationOptions(), Counts())
    prompt = encode_prompt(chatml, TALK[:2])
    assert row.prompt_length == len(prompt)
    assert row.chosen_ids[: len(prompt)] == row.rejected_ids[: len(prompt)] == prompt


def test_the_end_of_a_turn_is_trained_where_only_the_content_is_marked(chatml):
    chatml.chat_template = CONTENT_MARKED
    trained = trained_text(chatml, encode_conversation(chatml, TALK)).replace(" ", "")
    assert trained == "Boilwater.<|im_end|>fourminutes<|im_end|>"


def test_earlier_answers_of_a_thinking_template_are_not_trained_and_counted(chatml):
    """The whole is another text than what was sampled at those turns; the last answer is trained as it is sampled."""
    chatml.chat_template = THINKING
    talk = (*TALK[:2], Message("assistant", "<think>Hm.</think>Boil water."), *TALK[3:])
    counts = Counts()
    (several, one) = SEQUENCES.rows([record(talk), record(talk[:3])], chatml, TokenizationOptions(), counts)
    assert counts.lines() == [naming("1 kept ... earlier turns ... only the last ... (first: f:1)")]
    for row, turns, answer in ((several, talk, "four minutes"), (one, talk[:3], "Hm.</think>Boil water.")):
        prompt = encode_prompt(chatml, turns[:-1])
        assert row.ids[: len(prompt)] == prompt and row.trained == [False] * len(prompt) + [True] * (
            len(row.ids) - len(prompt)
        )
        text = chatml.decode(row.ids[len(prompt) :])
        assert text.startswith("<think>") and answer.replace(" ", "") in text.replace(" ", "")
    assert "Hm." not in chatml.decode(several.ids)


def test_turns_that_a_template_refuses_are_counted_with_its_own_words(chatml):
    chatml.chat_template = STRICT
    wrong = (TALK[1], TALK[1], TALK[2])
    counts = Counts()
    good = record(TALK[1:], "x")
    rows = [record(TALK, "x"), good, record(wrong, "x")]
    for make in (SEQUENCES.rows, PAIRS.rows, PROMPTS.rows):
        assert len(list(make(rows, chatml, TokenizationOptions(), counts))) == 1
    assert counts.lines() == [
        naming("3 dropped ... Conversation roles must alternate ... (first: f:1)"),
        naming("3 dropped ... System role not supported ... (first: f:1)"),
    ]


def test_prompts_without_a_bos_are_token_prefixes_on_real_rows(real_data, chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    path = real_data / "preference" / "oasst_en_100.jsonl.gz"
    rows = list(itertools.islice(read_records(read_rows(str(path)), Counts()), 8))
    for template, row in itertools.product((MARKED, THINKING, STRICT, TOOLS), rows):
        chatml.chat_template = template
        prompt = encode_prompt(chatml, row.messages)
        (sft,) = SEQUENCES.rows([row], chatml, TokenizationOptions(max_seq_len=10**6, train_turns="last"), Counts())
        is_prefix = sft.ids[: len(prompt)] == prompt and not any(sft.trained[: len(prompt)])
        is_answer = all(sft.trained[len(prompt) :]) and sft.ids[-1] == end
        assert is_prefix and is_answer, row.origin


@pytest.mark.parametrize("template", [TOOLS, TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")])
def test_tools_of_a_row_are_rendered_as_transformers_does_in_all_stages(chatml, template, tmp_path):
    """By lists and by JSON; tables fill in nulls. A text that spells a special token is broken up there too."""
    chatml.chat_template = template
    spelt = json.dumps(WEATHER).replace("</s>", chatml.eos_token)
    plain = json.loads(spelt.replace(chatml.eos_token, f"{chatml.eos_token[0]} {chatml.eos_token[1:]}"))
    turns, tool = [asdict(turn) for turn in TALK], json.loads(spelt)
    tables = [{**tool, "strict": None}], json.dumps([tool]), [], None
    sides = [{"chosen": "four minutes", "rejected": "No.", "prompt": turns[:-1], "tools": tools} for tools in tables]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(side) + "\n" for side in sides))
    rows, counts = list(read_records(read_rows(str(tmp_path / "rows.jsonl")), Counts())), Counts()
    made = [
        list(make(rows, chatml, TokenizationOptions(), counts)) for make in (SEQUENCES.rows, PAIRS.rows, PROMPTS.rows)
    ]
    for sft, pair, prompt, tools in zip(*made, ([plain], [plain], None, None), strict=True):
        options = {"tools": tools, "tokenize": False}
        text = chatml.apply_chat_template(turns[:-1], add_generation_prompt=True, **options)
        ids, whole = (
            chatml(t, add_special_tokens=False)["input_ids"]
            for t in (text, chatml.apply_chat_template(turns, **options))
        )
        assert ("weather" in text) == (tools is not None)
        assert prompt.prompt_ids == ids == pair.chosen_ids[: len(ids)] == pair.rejected_ids[: pair.prompt_length]
        assert sft.ids == whole[: len(sft.ids)] == pair.chosen_ids
        assert trained_text(chatml, sft).replace(" ", "") == "Boilwater.<|im_end|>fourminutes<|im_end|>"
        # Another reward model's template gets them too.
        again = [Message(**turn) for turn in json.loads(prompt.messages)]
        assert encode_conversation(chatml, [*again, TALK[-1]], "last").ids == pair.chosen_ids
    first, second, third, fourth = (prompt.prompt_id for prompt in made[2])
    assert first == second != third == fourth, "with other tools it is another prompt"
    assert not any("tools that" in line for line in counts.lines())


def test_tools_that_cannot_be_rendered_or_are_called_are_told_of(chatml, tmp_path):
    turns, counts = [asdict(turn) for turn in TALK[:3]], Counts()
    calls = [*turns[:-1], {"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": {"name": "f"}}]}]
    rows = [{"messages": turns, "tools": tools} for tools in ([WEATHER], "weather", [1], "[" * 10**5)] + [
        {"messages": calls}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chatml.chat_template = MARKED
    records = read_records(read_rows(str(tmp_path / "rows.jsonl")), counts)
    assert len(list(SEQUENCES.rows(records, chatml, TokenizationOptions(), counts))) == 1
    where = str(tmp_path / "rows.jsonl")
    assert [line for line in counts.lines() if "special" not in line] == [
        naming(f"3 dropped ... tools ... (first: {where}:2)"),
        naming(f"1 dropped ... calls tools ... (first: {where}:5)"),
        naming(f"1 kept ... tools ... not render ... (first: {where}:1)"),
    ]
    assert counts.unread == {}


def longer_tokenizer(folder: Path, text: str, *, special: bool) -> None:
    """Give the tokenizer of a model's folder a token beyond the model's embedding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([AddedToken(f"<filler {n}>", special=True) for n in range(size - len(tokenizer))])
    tokenizer.add_tokens([AddedToken(text, special=special)])
    assert tokenizer.convert_tokens_to_ids(text) == size
    tokenizer.save_pretrained(folder)


def test_an_added_token_above_the_embedding_is_no_obstacle_where_no_row_can_hold_it(bpe_folder, tmp_path):
    """As Gemma 3 has one for images: a text that spells it is broken up, so no row holds it."""
    folder = Path(save_tiny("llama", bpe_folder, tmp_path / "model"))
    longer_tokenizer(folder, "<image>", special=True)
    tokenizer = prepare_tokenizer(ModelSource(str(folder)), "auto")
    above = tokenizer.convert_tokens_to_ids("<image>")
    assert max(encode_prompt(tokenizer, [Message("user", "what is in <image>?")])) < above
    tokenizer.chat_template = "{% for m in messages %}<image>{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(InputError, match=naming(f"ids up to {above} ... vocabulary has {above} rows")):
        prepare_tokenizer(ModelSource(str(folder)), "auto")
    prepare_tokenizer(ModelSource(str(folder)), "human_assistant")


def test_an_added_token_above_the_embedding_that_text_can_hold_is_refused(bpe_folder, tmp_path):
    folder = Path(save_tiny("llama", bpe_folder, tmp_path / "model"))
    longer_tokenizer(folder, "<think>", special=False)
    with pytest.raises(InputError, match="they do not belong together"):
        prepare_tokenizer(ModelSource(str(folder)), "auto")
