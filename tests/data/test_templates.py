"""Templates: the rendered text, the trained tokens, and prompts that are token prefixes of their conversations."""

import itertools
from collections.abc import Iterator
from random import Random

import pytest
from support.messages import naming
from tokenizers import processors

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.sources import read_rows
from pipeline.data.templates import (
    HUMAN_ASSISTANT_TEMPLATE,
    RefusedTurnsError,
    encode_conversation,
    encode_prompt,
    encode_text,
    end_token_ids,
    render,
    set_template,
    special_tokens,
)
from pipeline.data.turns import Message, encoder_of
from pipeline.errors import InputError

PAD, BOS, EOS, UNK = 0, 1, 2, 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Nothing ends a turn, as in some Alpaca-like templates.
NO_END = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% else %}A: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
# Drops all but the last question, as thinking templates drop earlier reasoning.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.content }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
# The generation prompt ends in a space, which byte-level BPE puts before the next word's token.
OPEN_SPACE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} A: {% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
# Every turn tells its number, and the generation prompt how many there were: no turn is the same behind other turns.
NUMBERED = (
    "{% for m in messages %}{{ loop.index }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ messages | length + 1 }}:{% endif %}"
)
QUESTION = Message("user", "How do I make tea?")
ANSWER = Message("assistant", "Boil water.")
LONGER = (QUESTION, ANSWER, Message("user", "How long?"), Message("assistant", "four minutes"))


@pytest.fixture
def chatml(bpe_tokenizer):
    bpe_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    bpe_tokenizer.chat_template = CHATML
    return bpe_tokenizer


def spans(tokenizer, encoded) -> list[str]:
    """The trained runs of tokens as text."""
    runs = itertools.groupby(zip(encoded.ids, encoded.trained, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


def test_human_assistant_text(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    turns = (Message("system", "Be brief."), *LONGER)
    assert render(bpe_tokenizer, turns) == (
        "Be brief.\n\nHuman: How do I make tea?\n\nAssistant: Boil water.</s>"
        "\n\nHuman: How long?\n\nAssistant: four minutes</s>"
    )
    assert render(bpe_tokenizer, turns[:2], add_generation_prompt=True) == (
        "Be brief.\n\nHuman: How do I make tea?\n\nAssistant:"
    )


def test_bos_comes_first_only_where_encode_puts_it(bpe_tokenizer):
    set_template(bpe_tokenizer, "human_assistant")
    assert encode_prompt(bpe_tokenizer, [QUESTION])[0] != BOS
    adding = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    bpe_tokenizer.backend_tokenizer.post_processor = adding
    set_template(bpe_tokenizer, "human_assistant")
    assert encode_prompt(bpe_tokenizer, [QUESTION]).count(BOS) == 1
    assert encode_prompt(bpe_tokenizer, [QUESTION])[0] == BOS
    assert (
        encode_prompt(bpe_tokenizer, [QUESTION])
        == bpe_tokenizer("\n\nHuman: How do I make tea?\n\nAssistant:").input_ids
    )


def test_template_choice(bpe_tokenizer):
    with pytest.raises(InputError, match="auto, tokenizer or human_assistant"):
        set_template(bpe_tokenizer, "chatml")
    with pytest.raises(InputError, match="no chat template"):
        set_template(bpe_tokenizer, "tokenizer")
    bpe_tokenizer.chat_template = NO_END
    for name in ("auto", "tokenizer"):
        set_template(bpe_tokenizer, name)
        assert bpe_tokenizer.chat_template == NO_END
    set_template(bpe_tokenizer, "human_assistant")
    assert bpe_tokenizer.chat_template == HUMAN_ASSISTANT_TEMPLATE
    bpe_tokenizer.chat_template = {"default": CHATML, "tool_use": "x"}
    set_template(bpe_tokenizer, "auto")
    assert bpe_tokenizer.chat_template == CHATML
    bpe_tokenizer.eos_token = None
    with pytest.raises(InputError, match=naming("no EOS token ... eos_token ... tokenizer_config")):
        set_template(bpe_tokenizer, "human_assistant")


def test_the_template_is_saved_with_the_tokenizer(bpe_tokenizer, tmp_path):
    set_template(bpe_tokenizer, "auto")
    bpe_tokenizer.save_pretrained(tmp_path)
    again = type(bpe_tokenizer).from_pretrained(tmp_path)
    assert again.chat_template == HUMAN_ASSISTANT_TEMPLATE
    assert encode_prompt(again, [QUESTION]) == encode_prompt(bpe_tokenizer, [QUESTION])


def test_trained_span_is_the_content_and_its_end(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    encoded = encode_conversation(bpe_tokenizer, LONGER)
    assert spans(bpe_tokenizer, encoded) == [" Boil water.</s>", " four minutes</s>"]
    last = encode_conversation(bpe_tokenizer, LONGER, "last")
    assert spans(bpe_tokenizer, last) == [" four minutes</s>"]
    assert last.ids == encoded.ids
    assert encoded.ids[-1] == EOS and encoded.num_boundaries == 0


def test_what_follows_the_end_token_is_neither_trained_nor_kept_at_the_end(chatml):
    im_end = chatml.convert_tokens_to_ids("<|im_end|>")
    encoded = encode_conversation(chatml, LONGER)
    assert spans(chatml, encoded) == ["Boil water.<|im_end|>", "four minutes<|im_end|>"]
    assert encoded.ids[-1] == im_end
    assert end_token_ids(chatml) == {EOS, im_end}


def test_eos_is_appended_where_the_template_ends_no_turn(bpe_tokenizer):
    bpe_tokenizer.chat_template = NO_END
    encoded = encode_conversation(bpe_tokenizer, LONGER)
    assert spans(bpe_tokenizer, encoded) == [" Boil water.\n", " four minutes\n</s>"]
    assert end_token_ids(bpe_tokenizer) == {EOS}


def test_template_that_rewrites_earlier_turns_is_refused_by_name(bpe_tokenizer):
    bpe_tokenizer.chat_template = FORGETFUL
    with pytest.raises(InputError, match="rewrites earlier turns.*--template human_assistant"):
        encode_conversation(bpe_tokenizer, LONGER)


def test_generation_prompt_that_no_turn_begins_with_is_refused(bpe_tokenizer):
    bpe_tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(InputError, match="no prompt is a prefix"):
        encode_conversation(bpe_tokenizer, LONGER[:2])


def test_refused_turns_have_their_own_error(bpe_tokenizer):
    bpe_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(RefusedTurnsError, match="System role not supported"):
        encode_prompt(bpe_tokenizer, [QUESTION])


def test_tokens_that_merge_across_the_prompts_end_are_kept_apart_and_counted(bpe_tokenizer):
    bpe_tokenizer.chat_template = OPEN_SPACE
    turns = (Message("user", "x"), Message("assistant", "the capital"))
    prompt = encode_prompt(bpe_tokenizer, turns[:1])
    whole = encode_text(bpe_tokenizer, render(bpe_tokenizer, turns))
    assert whole[: len(prompt)] != prompt, "the case must be one where the tokenizer merges"
    encoded = encode_conversation(bpe_tokenizer, turns)
    assert encoded.ids[: len(prompt)] == prompt
    assert encoded.num_boundaries == 1
    assert spans(bpe_tokenizer, encoded) == ["the capital</s>"]


def test_a_conversation_must_end_in_an_answer(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    with pytest.raises(ValueError, match="ends in an assistant turn"):
        encode_conversation(bpe_tokenizer, LONGER[:3])


@pytest.mark.parametrize("name", ["hh_harmless", "dpo_zh_demo", "dpo_en_demo", "ja_vicuna_gpt4", "oasst_en_100"])
def test_prompts_are_token_prefixes_on_real_rows(real_data, real_tokenizer, name):
    set_template(real_tokenizer, "auto")
    eos = real_tokenizer.eos_token_id
    path = real_data / "preference" / f"{name}.jsonl.gz"
    for record in itertools.islice(read_records(read_rows(str(path)), Counts()), 40):
        prompt = encode_prompt(real_tokenizer, record.messages)
        encoded = encode_conversation(real_tokenizer, record.all_turns, "last")
        is_prefix = encoded.ids[: len(prompt)] == prompt
        is_rest_trained = encoded.trained == [False] * len(prompt) + [True] * (len(encoded.ids) - len(prompt))
        is_ended_once = encoded.ids[-1] == eos and eos not in encoded.ids[len(prompt) : -1]
        says_the_same = real_tokenizer.decode(encoded.ids[len(prompt) : -1]).strip() == record.chosen.strip()
        assert is_prefix and is_rest_trained and is_ended_once and says_the_same, record.origin
        assert encoded.num_boundaries == 0, record.origin


def test_all_turns_and_last_turn_encode_alike_on_real_transcripts(real_data, real_tokenizer):
    set_template(real_tokenizer, "auto")
    path = real_data / "preference" / "hh_harmless.jsonl.gz"
    for record in itertools.islice(read_records(read_rows(str(path)), Counts()), 60):
        every = encode_conversation(real_tokenizer, record.all_turns, "all")
        last = encode_conversation(real_tokenizer, record.all_turns, "last")
        num_answers = sum(turn.role == "assistant" for turn in record.all_turns)
        num_ends = sum(t and i == real_tokenizer.eos_token_id for i, t in zip(every.ids, every.trained, strict=True))
        is_same = every.ids == last.ids
        assert is_same and num_ends == num_answers, record.origin


# --- conversations of many turns --------------------------------------------------------------------------------------

SAYINGS = ("x", "the capital of", "  Boil  water,\n\nadd the leaves", "Human: 猫 🦀", "Sphinx </s> of quartz", "a 10:")


def exchanges(number: int) -> list[Message]:
    """A conversation of `number` questions and answers."""
    sayings = itertools.islice(itertools.cycle(SAYINGS), 2 * number)
    return [Message(("user", "assistant")[place % 2], text.strip()) for place, text in enumerate(sayings)]


def ids_by_definition(tokenizer, turns) -> list[int]:
    """Every prompt and every turn rendered and encoded with all that comes before it."""
    turns = [Message(turn.role, turn.content.replace("</s>", "< /s>")) for turn in turns]
    ids, text = [], ""
    for end in range(0, len(turns), 2):
        prompt = render(tokenizer, turns[: end + 1], add_generation_prompt=True)
        for longer in (prompt, render(tokenizer, turns[: end + 2])):
            whole = encode_text(tokenizer, longer)
            ids = whole if whole[: len(ids)] == ids else ids + encode_text(tokenizer, longer[len(text) :])
            text = longer
    return ids


@pytest.mark.parametrize("template", [HUMAN_ASSISTANT_TEMPLATE, CHATML, NO_END, OPEN_SPACE, NUMBERED])
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_ids_of_many_turns_are_those_of_their_definition(chatml, template, number):
    chatml.chat_template = template
    ids = ids_by_definition(chatml, exchanges(number))
    encoded = encode_conversation(chatml, exchanges(number)).ids
    ends = [EOS] if template == NO_END else []  # no end token in the text: one is appended
    assert encoded == [*ids[: len(encoded) - len(ends)], *ends] and len(ids) - len(encoded) <= 1
    if template == OPEN_SPACE:
        assert ids != encode_text(chatml, render(chatml, exchanges(number))), "the tokenizer merges at boundaries"


def sides(rows: int) -> Iterator[list[Message]]:
    """Yield prompts with responses, of words, spaces and signs at random; every other one has the last one's prompt."""
    random = Random(0)
    parts = [
        "the",
        " capital",
        " of",
        " tea",
        "  ",
        "\n\n",
        " 10",
        "0",
        ":",
        " 猫",
        "é",
        " don't",
        "A",
        " ",
        ".",
        "</s>",
    ]
    for _ in range(rows):
        prompt, *responses = ("".join(random.choices(parts, k=12)).strip() or "x" for _ in range(3))
        for response in responses:
            yield [Message("user", prompt), Message("assistant", response)]


@pytest.mark.parametrize("template", [HUMAN_ASSISTANT_TEMPLATE, CHATML, NO_END, OPEN_SPACE])
def test_ids_of_pairs_are_those_of_their_definition(chatml, template):
    """What the tokenizer does with a response must not depend on where the prompt in front of it is cut."""
    chatml.chat_template = template
    special, ends = special_tokens(chatml), [EOS] if template == NO_END else []
    for turns in sides(200):
        ids = ids_by_definition(chatml, turns)
        encoded = encode_conversation(chatml, turns, "last", special).ids
        # Behind the last end token there may be text.
        assert encoded == [*ids[: len(encoded) - len(ends)], *ends] and len(ids) - len(encoded) <= 2


def test_a_prompt_is_not_cut_at_words_where_a_token_spans_two(bpe_tokenizer):
    set_template(bpe_tokenizer, "human_assistant")
    bpe_tokenizer.add_tokens(["l of\n\nAssistant: Par"])
    turns = [Message("user", "the capital of"), Message("assistant", "Paris")]
    prompt, whole = encode_prompt(bpe_tokenizer, turns[:1]), encode_text(bpe_tokenizer, render(bpe_tokenizer, turns))
    assert whole[: len(prompt)] != prompt, "the case must be one where the tokenizer merges"
    assert encode_conversation(bpe_tokenizer, turns).num_boundaries == 1


def test_the_prompt_of_a_pair_is_encoded_once(bpe_tokenizer, monkeypatch):
    set_template(bpe_tokenizer, "human_assistant")
    encode, num_chars = encoder_of(bpe_tokenizer), [0]

    def counted_encode(text):
        num_chars[0] += len(text)
        return encode(text)

    monkeypatch.setattr("pipeline.data.templates.encoder_of", lambda _: counted_encode)
    special, prompt = special_tokens(bpe_tokenizer), Message("user", "What is the capital? " * 50 + "Say it.")
    num_chars[0] = 0
    for text in ("Paris", "Boil water"):
        encode_conversation(bpe_tokenizer, [prompt, Message("assistant", text)], "last", special)
    assert len(prompt.content) < num_chars[0] < 1.2 * len(prompt.content)


def test_many_turns_take_time_linear_in_turns(bpe_tokenizer, monkeypatch):
    """By the characters that are rendered and encoded for twice as many turns: a quadratic way takes four times."""
    set_template(bpe_tokenizer, "human_assistant")
    counted = [0]
    render_text, encode = type(bpe_tokenizer).apply_chat_template, type(bpe_tokenizer).__call__

    def counted_render(self, *arguments, **options):
        text = render_text(self, *arguments, **options)
        counted[0] += len(text)
        return text

    def counted_encode(self, text, **options):
        counted[0] += len(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(bpe_tokenizer), "apply_chat_template", counted_render)
    monkeypatch.setattr(type(bpe_tokenizer), "__call__", counted_encode)
    needed = []
    for number in (24, 48):
        counted[0] = 0
        encode_conversation(bpe_tokenizer, exchanges(number))
        needed.append(counted[0])
    assert needed[1] < 2.1 * needed[0]


@pytest.mark.parametrize("state", ["as loaded", "truncates", "pads", "splits special tokens"])
def test_ids_are_those_of_the_tokenizers_call(bpe_tokenizer, state):
    """Ids are made without offsets, past the call; what the call undoes or heeds must be undone and heeded."""
    backend = bpe_tokenizer.backend_tokenizer
    for text in ("", "tea", "Boil water.</s> \n\n h\u00e9llo \U0001f600", "Boil water. " * 40):
        bpe_tokenizer.split_special_tokens = state == "splits special tokens"
        expected = bpe_tokenizer(text, add_special_tokens=False)["input_ids"]
        if state == "truncates":
            backend.enable_truncation(3)
        elif state == "pads":
            backend.enable_padding(length=500)
        backend.encode_special_tokens = False  # as a call with other options leaves it
        assert encode_text(bpe_tokenizer, text) == list(expected)


def test_a_tokenizer_with_a_call_of_its_own_is_called(bpe_tokenizer):
    class Loud(type(bpe_tokenizer)):
        def __call__(self, text, **options):
            return super().__call__(text.upper(), **options)

    bpe_tokenizer.__class__ = Loud
    assert encode_text(bpe_tokenizer, "tea") == encode_text(bpe_tokenizer, "TEA") != []
    assert bpe_tokenizer.decode(encode_text(bpe_tokenizer, "tea")) == "TEA"
