"""Chat templates as models publish them, read from TRL's package where it is here, on a published tokenizer."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from support.messages import naming
from transformers import GPT2TokenizerFast

from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import Record
from pipeline.data.row_kinds import PAIRS, PROMPTS, SEQUENCES, TokenizationOptions
from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message
from pipeline.models.tokenizers import eos_ids

FOUND = importlib.util.find_spec("trl")
if FOUND is None:
    pytest.skip("TRL is not installed, whose package has published templates", allow_module_level=True)
# Family -> the token that ends its turns. TRL's `training` ones are these with marks.
ENDS = {
    "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen2_5_training": "<|im_end|>",
    "qwen3": "<|im_end|>", "qwen3_training": "<|im_end|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "phi3": "<|end|>", "phi3_training": "<|end|>", "phi3_5": "<|end|>",
}  # fmt: skip
QUESTION, ANSWER = Message("user", "How do I make tea?"), Message("assistant", "Boil water.")
MORE = (Message("user", "How long?"), Message("assistant", "four minutes"))
SYSTEM, TOOLS = Message("system", "Be brief."), [{"type": "function", "function": {"name": "weather"}}]
TURNS = {
    "plain": (QUESTION, ANSWER),
    "several": (QUESTION, ANSWER, *MORE),
    "system": (SYSTEM, QUESTION, ANSWER),
    "tools": (Message("tools", json.dumps(TOOLS)), QUESTION, ANSWER),
    "thought": (QUESTION, Message("assistant", "<think>\nHm.\n</think>\n\nBoil water.")),
    "unordered": (QUESTION, *MORE[:1], ANSWER),
}
REFUSED = {("gemma", "system"), ("gemma", "unordered"), ("gemma3", "unordered")}
IGNORED_TOOLS = {"llama3", "gemma", "gemma3", "phi3", "phi3_training", "phi3_5"}


@pytest.fixture(params=ENDS, scope="module")
def tokenizer(request: pytest.FixtureRequest, real_data: Path) -> GPT2TokenizerFast:
    made = GPT2TokenizerFast.from_pretrained(real_data / "tokenizers" / "gpt2", eos_token=ENDS[request.param])
    folder = Path(next(iter(FOUND.submodule_search_locations)))
    made.chat_template = (folder / "chat_templates" / f"{request.param}.jinja").read_text(encoding="utf-8")
    special = re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", made.chat_template)
    made.add_special_tokens({"additional_special_tokens": sorted({*special})})
    made.name_or_path = request.param
    set_template(made, "tokenizer")
    return made


@pytest.mark.parametrize("kind", TURNS)
def test_what_is_trained_follows_the_prompt_that_is_sampled_from(tokenizer: GPT2TokenizerFast, kind: str) -> None:
    name, turns = tokenizer.name_or_path, TURNS[kind]
    row = Record(turns[:-1], turns[-1].content, "No.", prompt_id=0, origin=Origin("f", 1), split=None)
    options = TokenizationOptions(max_seq_len=10**4, max_prompt_seq_len=10**4, train_turns="last")
    counts = Counts()
    makers = (SEQUENCES.rows, PAIRS.rows, PROMPTS.rows)
    made = [next(iter(make([row], tokenizer, options, counts)), None) for make in makers]
    if (name, kind) in REFUSED:
        assert made == [None] * 3 and counts.lines()[0] == naming("refused ... template")
        return
    sft, pair, prompt = made
    tools = TOOLS if kind == "tools" else None
    plain = [asdict(turn) for turn in turns if turn.role != "tools"]
    text = tokenizer.apply_chat_template(plain[:-1], tools=tools, add_generation_prompt=True, tokenize=False)
    assert prompt.prompt_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert pair.chosen_ids[: pair.prompt_length] == prompt.prompt_ids == pair.rejected_ids[: pair.prompt_length]
    size = len(prompt.prompt_ids)
    assert sft.ids[:size] == prompt.prompt_ids and not any(sft.trained[:size])
    assert sft.ids[-1] == tokenizer.eos_token_id and sft.ids[-1] in eos_ids(tokenizer)
    trained = tokenizer.decode([token for token, flag in zip(sft.ids, sft.trained, strict=True) if flag])
    assert turns[-1].content.split("\n")[-1] + ENDS[name] in trained
    ignored = naming("tools ... not render") in counts.lines()
    assert (kind == "tools" and name in IGNORED_TOOLS) == ignored == (kind == "tools" and "weather" not in text)


def test_marks_are_the_mask_that_transformers_makes_of_them(tokenizer: GPT2TokenizerFast) -> None:
    """But for the line end behind a turn, which no sampler makes."""
    if "generation %}" not in tokenizer.chat_template:
        return
    turns = TURNS["several"]
    plain = [asdict(turn) for turn in turns]
    theirs = tokenizer.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True)
    ours = encode_conversation(tokenizer, turns)
    assert ours.ids == theirs["input_ids"][: len(ours.ids)]
    behind = [False, *(token == tokenizer.eos_token_id for token in ours.ids)]
    flags = zip(theirs["assistant_masks"], behind, strict=False)
    assert ours.trained == [bool(flag) and not is_behind for flag, is_behind in flags][: len(ours.ids)]
    assert sum(ours.trained) > 6
