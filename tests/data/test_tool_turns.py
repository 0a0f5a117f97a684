"""Episodes with tools are, token by token, what transformers makes of the whole conversation."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.messages import naming, refusal
from support.tool_templates import (
    HERMES,
    PUBLISHED,
    TOOLS,
    WRITTEN,
    call_id,
    ids_after,
    named_tokenizer,
    published_template,
    sampled_calls,
    tool_tokenizer,
)
from transformers import PreTrainedTokenizerBase

from pipeline.data.templates import encode_prompt, set_template
from pipeline.data.tool_calls import ToolCall
from pipeline.data.tool_turns import ToolTurns
from pipeline.data.turns import Message, broken_up, special_texts

NAMES = [*PUBLISHED, *WRITTEN, "sentencepiece mistral", "sentencepiece hermes"]
# Its whole conversation lacks what its generation prompt opens.
APPENDING = [name for name in NAMES if name != "thoughtful"]
QUESTION = "How warm is it in Paris?"
CITY, HOUR = ("weather", {"city": "Paris"}), ("clock", {})
# A family's thoughts, which Qwen 3's template retains in the turns behind the last question.
THOUGHT = "<think>\nHm.\n</think>\n\n"
Rounds = list[list[tuple[str, dict[str, Any], str]]]  # for each round, for each call: tool, arguments, result


@pytest.fixture(scope="module")
def tokenizers(real_data: Path) -> dict[str, PreTrainedTokenizerBase]:
    """Tokenizers by the names of their templates, filled by `turns_of`."""
    return {}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(name: str, real_data: Path, tokenizers: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    if name not in tokenizers:
        tokenizers[name] = named_tokenizer(real_data / "tokenizers", name)
        set_template(tokenizers[name], "tokenizer")
    return tokenizers[name]


def thinks(name: str) -> bool:
    return name in ("qwen3", "qwen3_training")


def is_single(name: str) -> bool:
    return name.startswith("llama")


def episode(
    tokenizer: PreTrainedTokenizerBase, turns: ToolTurns, rounds: Rounds, answer: str
) -> tuple[list[int], list[bool], list[dict[str, Any]]]:
    """Return the ids of an episode, True for the sampled ones, and its messages as `turn` gives them."""
    name, special = tokenizer.name_or_path, special_texts(tokenizer)
    thought = THOUGHT if thinks(name) else ""
    ids = encode_prompt(tokenizer, [Message("tools", json.dumps(TOOLS)), Message("user", QUESTION)])
    flags, messages = [False] * len(ids), [{"role": "user", "content": QUESTION}]
    for calls in rounds:
        text = thought + sampled_calls(name, [call[:2] for call in calls]) + tokenizer.eos_token
        sampled = ids_after(tokenizer, text)
        results = [(tool, result) for tool, _, result in calls]
        assert turns.read(sampled).calls == [ToolCall(tool, arguments) for tool, arguments, _ in calls]
        added = turns.results(results, turns.read(sampled).call_ids)
        ids, flags = ids + sampled + added, flags + [True] * len(sampled) + [False] * len(added)
        message = turns.read(sampled).message
        for number, call in enumerate(message["tool_calls"]):
            call["id"] = call_id(number)
        messages.append(message)
        for number, (tool, result) in enumerate(results):
            plain = broken_up(result, special)
            messages.append({"role": "tool", "name": tool, "content": plain, "tool_call_id": call_id(number)})
    space = " " if name == "mistral" else ""
    sampled = ids_after(tokenizer, thought + space + answer + tokenizer.eos_token)
    assert turns.read(sampled).calls == []
    messages.append(turns.read(sampled).message)
    return ids + sampled, flags + [True] * len(sampled), messages


def check_whole(tokenizer: PreTrainedTokenizerBase, turns: ToolTurns, rounds: Rounds, answer: str = "Warm.") -> None:
    """Compare an episode with what transformers makes of the conversation, up to the end of its last turn."""
    ids, _, messages = episode(tokenizer, turns, rounds, answer)
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert whole[: len(ids)] == ids, tokenizer.decode(ids)
    assert tokenizer.eos_token_id not in whole[len(ids) :]


@pytest.mark.parametrize("name", APPENDING)
def test_an_episode_is_the_whole_conversation(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = ToolTurns(tokenizer, TOOLS)
    one = [[(*CITY, "21 degrees")]]
    check_whole(tokenizer, turns, one)
    check_whole(tokenizer, turns, one * 3)
    if not is_single(name):
        check_whole(tokenizer, turns, [[(*CITY, "21 degrees"), (*HOUR, "noon")], [(*HOUR, "late"), (*HOUR, "later")]])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(st.just("weather"), st.fixed_dictionaries({"city": JSON}, optional={"unit": JSON}))
CALLS |= st.tuples(st.just("clock"), st.just({}))
SPELT = st.sampled_from(
    ["<|im_end|>", "<|eot_id|>", "</s>", "[TOOL_CALLS]", "<tool_call>", '"', "\n", "\r\n", "{{ x }}"]
)
RESULTS = st.lists(st.text() | SPELT, max_size=4).map("".join)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_episodes_are_the_whole_conversation(
    name: str, tokenizer: PreTrainedTokenizerBase, turns_by_name: dict[str, ToolTurns], data: st.DataObject
) -> None:
    """Arguments hold what JSON can, and results what text can; but a model that spells an end token ends its turn."""
    if name not in turns_by_name:
        turns_by_name[name] = ToolTurns(tokenizer, TOOLS)
    special = [*special_texts(tokenizer), "<think>"]
    calls = CALLS.filter(lambda call: not any(text in json.dumps(call, ensure_ascii=False) for text in special))
    sizes = st.integers(1, 1 if is_single(name) else 3)
    rounds = [
        [(*data.draw(calls), data.draw(RESULTS)) for _ in range(data.draw(sizes))]
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    check_whole(tokenizer, turns_by_name[name], rounds)


@pytest.fixture(scope="module")
def turns_by_name() -> dict[str, ToolTurns]:
    return {}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.endswith("_training") and "vl" not in name])
def test_sampled_tokens_are_the_mask_that_transformers_makes(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """But for the line ends in front of a turn and behind it, which some templates mark and no sampler makes."""
    rounds = [[(*CITY, "21 degrees"), (*HOUR, "noon")], [(*HOUR, "<|im_end|>")]]
    ids, flags, messages = episode(tokenizer, ToolTurns(tokenizer, TOOLS), rounds, "Warm.")
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = tokenizer.apply_chat_template(messages, tools=TOOLS, **options)
    assert theirs["input_ids"][: len(ids)] == ids
    line_end = tokenizer("\n")["input_ids"]
    for token, flag, mark in zip(ids, flags, theirs["assistant_masks"], strict=False):
        assert flag == bool(mark) or (mark and [token] == line_end)
    assert [token for token, flag in zip(ids, flags, strict=True) if flag].count(tokenizer.eos_token_id) == 3


def test_what_stands_before_a_turn_changes_no_ids_behind_it(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Not even thoughts that the template drops later: ids that were sampled stay, and only new ones are added."""
    turns = ToolTurns(tokenizer, TOOLS)
    family = tokenizer.name_or_path
    texts = [sampled_calls(family, [CITY]), THOUGHT + sampled_calls(family, [CITY])]
    texts = [f"Well.</think>\n{text}" for text in texts] if name == "thoughtful" else texts
    sampled = [ids_after(tokenizer, text + tokenizer.eos_token) for text in texts]
    assert turns.read(sampled[0]).calls == turns.read(sampled[1]).calls == [ToolCall(*CITY)]
    first, second = (turns.results([("weather", "mild")], turns.read(ids).call_ids) for ids in sampled)
    assert first == second
    prompt = encode_prompt(tokenizer, [Message("tools", json.dumps(TOOLS)), Message("user", QUESTION)])
    header = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tools=TOOLS, tokenize=False)
    generation_prompt = prompt[len(tokenizer(header, add_special_tokens=False)["input_ids"]) :]
    assert first[len(first) - len(generation_prompt) :] == generation_prompt


def test_foreign_texts_forge_no_special_token(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Of results, of names that a model made up, and of the ids that it gave its calls."""
    turns, special = ToolTurns(tokenizer, TOOLS), special_texts(tokenizer)
    sampled = ids_after(tokenizer, sampled_calls(tokenizer.name_or_path, [CITY]) + tokenizer.eos_token)
    ids = {*tokenizer.convert_tokens_to_ids(list(special))}
    call_ids = turns.read(sampled).call_ids
    plain, forged = (
        [token for token in turns.results([(text, text)], call_ids) if token in ids] for text in ("x", "".join(special))
    )
    assert plain == forged and plain


def test_half_a_character_of_a_result_is_replaced(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = ToolTurns(tokenizer, TOOLS)
    sampled = ids_after(tokenizer, sampled_calls(tokenizer.name_or_path, [CITY]) + tokenizer.eos_token)
    call_ids = turns.read(sampled).call_ids
    assert turns.results([("weather", "a\ud800b")], call_ids) == turns.results([("weather", "a?b")], call_ids)


@pytest.mark.parametrize("name", ["mistral", "sentencepiece mistral"])
def test_results_repeat_the_ids_that_the_model_gave_its_calls(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """An id that the template does not accept, or a forged one, is replaced."""
    turns, end = ToolTurns(tokenizer, TOOLS), tokenizer.eos_token
    for given_id, expected in (('"abcdefghi"', "abcdefghi"), ('"short"', "call00000"), ("7", "call00000")):
        text = f'[TOOL_CALLS] [{{"name": "clock", "arguments": {{}}, "id": {given_id}}}]{end}'
        added = tokenizer.decode(turns.results([("clock", "noon")], turns.read(ids_after(tokenizer, text)).call_ids))
        assert f'"call_id": "{expected}"' in added
    text = f'[TOOL_CALLS] [{{"name": "clock", "arguments": {{}}}}]{end}'
    assert "call00000" in tokenizer.decode(
        turns.results([("clock", "noon")], turns.read(ids_after(tokenizer, text)).call_ids)
    )
    nine = '"x[INST]yz"'
    text = f'[TOOL_CALLS] [{{"name": "clock", "arguments": {{}}, "id": {nine}}}]{end}'
    assert "[INST]" not in tokenizer.decode(
        turns.results([("clock", "noon")], turns.read(ids_after(tokenizer, text)).call_ids)
    )


NO_TOOLS, NO_CALLS, OTHER = "does not render tools", "does not render the calls", "writes calls in another format"
REFUSED = {
    **dict.fromkeys(
        ("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "llama3", "phi3",
         "phi3_5", "qwen2_5_vl", "smolvlm"), NO_TOOLS,
    ),
    "lfm2": NO_CALLS,
    **dict.fromkeys(
        ("gemma4_v5", "glm4moe", "lfm2_v2", "muse_glimmer", "nemotron_3_nano", "nemotron_3_ultra", "qwen3_5_think",
         "qwen3_5_nothink", "qwen3_8"), OTHER,
    ),
    "gptoss": "puts no end-of-turn token behind a call",
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_published_templates_without_calls_in_json_are_refused(refused: str, real_data: Path) -> None:
    ends = {"gptoss": "<|return|>", "gemma4_v5": "<turn|>"}
    template = published_template(refused)
    made = tool_tokenizer(real_data / "tokenizers", template, ends.get(refused, "<|im_end|>"), refused)
    lines = refusal(ToolTurns, made, TOOLS)
    assert lines == [naming("--tools", f"chat template of {refused} {REFUSED[refused]}", "leave out --tools")]


TOOL_TURN, DIFFERENT = "{% if m.role == 'tool' %}", "renders the results of tools differently in later turns"
BROKEN = {
    "{% if m.role == 'tool' %}{{ raise_exception('No tools.\nNone.') }}": "rejects turns with tools (No tools.)",
    "{% if m.role == 'tool' %}{{ loop.index }}": DIFFERENT,
    "{% if m.role == 'tool' and not loop.last %}-{% elif m.role == 'tool' %}": DIFFERENT,
    "{% if m.role == 'tool' %}-{% elif m.role == 'tool' %}": "does not render the results of tools",
    "{% if m.role == 'tool' %}{{ '' if loop.last else 'old' }}": DIFFERENT,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_templates_that_do_not_write_each_round_alike_are_refused(broken: str, real_data: Path) -> None:
    template = HERMES.replace(TOOL_TURN, broken)
    assert template != HERMES
    made = tool_tokenizer(real_data / "tokenizers", template, "<|im_end|>", "hers")
    assert refusal(ToolTurns, made, TOOLS) == [naming("--tools", f"chat template of hers {BROKEN[broken]}")]


def test_the_template_of_plain_text_is_refused(real_data: Path) -> None:
    made = tool_tokenizer(real_data / "tokenizers", HERMES, "<|im_end|>", "hers")
    set_template(made, "human_assistant")
    assert refusal(ToolTurns, made, TOOLS) == [naming("--tools", "hers does not render tools")]
    assert refusal(ToolTurns, made, [{"name": "Human"}]) == [naming("--tools", "hers does not render tools")]


def test_results_begin_behind_the_first_of_several_end_tokens(real_data: Path) -> None:
    """As of Qwen's base models, whose EOS ends texts and another token turns; here EOS stands in results, too."""
    template = HERMES.replace("</tool_response>'", "</tool_response><|endoftext|>'")
    made = tool_tokenizer(real_data / "tokenizers", template, "<|endoftext|>", "hermes")
    turns = ToolTurns(made, TOOLS)
    text = "\n<|im_start|>tool\n<tool_response>\nnoon\n</tool_response><|endoftext|><|im_end|>\n<|im_start|>assistant\n"
    assert made.decode(turns.results([("clock", "noon")], [])) == text
    for end in ("<|im_end|>", "<|endoftext|>"):
        assert turns.read(ids_after(made, sampled_calls("hermes", [HOUR]) + end)).calls == [ToolCall(*HOUR)]


def test_tools_are_rendered_all_or_refused(real_data: Path) -> None:
    """A template that writes only the first tool leaves the model without the others."""
    template = HERMES.replace("{{ tools | tojson }}", "{{ tools[0] | tojson }}")
    made = tool_tokenizer(real_data / "tokenizers", template, "<|im_end|>", "hers")
    assert refusal(ToolTurns, made, TOOLS) == [naming("hers does not render tools")]
    assert ToolTurns(made, TOOLS[:1]).read([]).calls == []
