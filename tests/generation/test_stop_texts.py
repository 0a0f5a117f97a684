"""Texts that end responses, found in a window of tokens as a slow loop finds them in all, on every backend."""

import random
from typing import Any

import pytest
from support.decode_models import FUNCTIONS, llama, poll_often, random_prompts
from support.marks import slow_but
from transformers import PreTrainedTokenizerBase

from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import generate
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import RandomKey, Sampling, Vocabulary
from pipeline.generation.session import stopped_length

TEXT = (
    "Boil water.\n\nHuman: \u5be7\u4e36\u9f98 \U0001f9d1\u200d\U0001f4bb caf\u00e9 , isn 't it ?"
    "\n\n  Human : 1 2  3 \t\n\u00e9"
)


def slow(stop: tuple[str, ...], ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The number of tokens of the shortest beginning that contains one of the texts."""
    for number in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:number], clean_up_tokenization_spaces=False)
        if any(one in text for one in stop):
            return number
    return None


def test_a_window_finds_what_a_loop_over_all_beginnings_finds(real_tokenizer: PreTrainedTokenizerBase) -> None:
    """Texts of characters of several tokens, with blanks at their ends, and of special tokens; found bit by bit."""
    vocabulary, number = Vocabulary.of(real_tokenizer), random.Random(0)
    ids, end = real_tokenizer(TEXT, add_special_tokens=False)["input_ids"], real_tokenizer.eos_token
    found = set()
    for _ in range(150):
        row = [number.choice(ids) for _ in range(number.randrange(40))] + ids * number.randrange(2)
        row = [*row, real_tokenizer.eos_token_id, *ids]
        first = number.randrange(len(TEXT))
        stop = (TEXT[first : first + number.choice((1, 2, 5, 12))], number.choice(("never", end)))
        expected, seen, length = slow(stop, row, real_tokenizer), 0, None
        while length is None and seen < len(row):
            now = min(len(row), seen + number.choice((1, 2, 4, 30)))
            length, seen = stopped_length(stop, row[:now], vocabulary, seen=seen), now
        assert length == expected, (stop, row)
        assert stopped_length(stop, row, vocabulary) == expected
        found.add(expected)
    assert len(found) > 20


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_bytes_that_are_decoded_together_hide_no_text(step: int, real_tokenizer: PreTrainedTokenizerBase) -> None:
    """A line end between rare characters: SentencePiece replaces all bytes in a row where one of them is missing."""
    vocabulary, rare = Vocabulary.of(real_tokenizer), "\u9f98\u9750\u9f49\u7229" * 4
    for text in (f"{rare}\n{rare}", f"\n{rare}"):
        ids = real_tokenizer(text, add_special_tokens=False)["input_ids"]
        for behind in (0, 1):
            length, seen = None, 0
            while length is None and seen < len(ids) - behind:
                now = min(seen + step, len(ids) - behind)
                length, seen = stopped_length(("\n",), ids[:now], vocabulary, seen=seen), now
            assert length == slow(("\n",), ids, real_tokenizer) is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", slow_but(["eager", "static"], ["eager", *FUNCTIONS]))
def test_rollouts_are_those_without_stop_texts_cut_by_a_loop(
    backend: str, bpe_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll_often(monkeypatch)
    model, vocabulary = llama(vocab_size=400), Vocabulary.of(bpe_tokenizer)
    source = (
        EagerGenerator(model, vocabulary) if backend == "eager" else Generator(FUNCTIONS[backend](model), vocabulary)
    )

    def sampled(*stop: str) -> Any:
        settings: dict[str, Any] = {"num_samples": 3, "num_slots": 4, "key": RandomKey(3, "rollout")}
        return generate(source, random_prompts((3, 5, 1, 8)), sampling=Sampling(12, 1.5, stop=stop), **settings)

    whole, stop = sampled(), ("e", "</s>", "th")
    found, places = sampled(*stop), set()
    for n, response in enumerate(whole.responses):
        ids = response.tolist()
        length = slow(stop, ids, bpe_tokenizer)
        assert found.responses[n].tolist() == ids[:length]
        assert found.log_probs[n].tolist() == pytest.approx(whole.log_probs[n].tolist()[:length], abs=1e-5)
        assert bool(found.finished[n]) == (length is not None or bool(whole.finished[n]))
        places.add(length)
    assert None in places and len(places) > 3, "some go on to their limit, others end at several places"
