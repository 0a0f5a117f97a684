"""Loading ends in one line, padding never adds a token, and every end token is found."""

import pytest
from support.messages import naming
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from pipeline.data.templates import set_template
from pipeline.errors import EnvironmentFault, InputError
from pipeline.models.tokenizers import PaddingToken, choose_padding_token, eos_ids, load_tokenizer

PAD, EOS, UNK = 0, 2, 3


def test_saved_folder_loads_again(bpe_folder, bpe_tokenizer):
    loaded = load_tokenizer(str(bpe_folder))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded("tea for four").input_ids == bpe_tokenizer("tea for four").input_ids


@pytest.mark.parametrize("path", ["./nothing/here", "/nothing/here", "a/b/c"])
def test_missing_folder_is_one_line(path):
    with pytest.raises(InputError, match="no such folder") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_folder_without_tokenizer_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds no tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_encodes_nothing_is_one_line(tmp_path):
    only_special = {"</s>": 0, "<pad>": 1, "<unk>": 2}  # BPE drops what is not in its vocabulary
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(only_special, [])), eos_token="</s>")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=naming("plain text ... no tokens")) as refused:
        load_tokenizer(str(tmp_path))
    assert str(refused.value).startswith(f"{tmp_path}: ") and "\n" not in str(refused.value)


def test_hub_without_network_says_how_to_prepare(monkeypatch):
    def fail(path, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(EnvironmentFault, match="hf download facebook/opt-1.3b") as error:
        load_tokenizer("facebook/opt-1.3b")
    assert "\n" not in str(error.value)


def test_own_pad_token_is_used(bpe_tokenizer):
    assert choose_padding_token(bpe_tokenizer) == PaddingToken(PAD, "<pad>", "tokenizer")


def test_reserved_token_of_the_vocabulary_is_used_before_unk(bpe_tokenizer):
    bpe_tokenizer.pad_token = None
    assert choose_padding_token(bpe_tokenizer) == PaddingToken(PAD, "<pad>", "reserved")


def test_a_pad_token_that_ends_texts_is_not_used(bpe_tokenizer):
    """Padding with an end token is the classic way to unlearn stopping."""
    bpe_tokenizer.pad_token = bpe_tokenizer.eos_token
    assert choose_padding_token(bpe_tokenizer) == PaddingToken(PAD, "<pad>", "reserved")


def test_published_tokenizers(real_tokenizer):
    """The published files say: OPT pads with 1; GPT-2 has one token for everything; Mistral has only unk."""
    expected = {50257: (50256, "eos"), 50265: (1, "tokenizer"), 32000: (0, "unk"), 50570: (4, "reserved")}
    size = len(real_tokenizer)
    policy = choose_padding_token(real_tokenizer)
    assert (policy.pad_id, policy.source) == expected[size]
    assert len(real_tokenizer) == size


def test_no_token_to_pad_with_is_an_error(bpe_tokenizer, monkeypatch):
    for name in ("pad_token", "eos_token", "unk_token"):
        setattr(bpe_tokenizer, name, None)
    monkeypatch.setattr(bpe_tokenizer, "get_vocab", dict)
    with pytest.raises(InputError, match="no pad, reserved, unk or EOS"):
        choose_padding_token(bpe_tokenizer)


def test_all_end_tokens_are_found(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    assert eos_ids(bpe_tokenizer) == {EOS}
    assert eos_ids(bpe_tokenizer, GenerationConfig(eos_token_id=7)) == {EOS, 7}
    assert eos_ids(bpe_tokenizer, GenerationConfig(eos_token_id=[7, 8])) == {EOS, 7, 8}
    assert eos_ids(bpe_tokenizer, GenerationConfig()) == {EOS}


def test_end_of_turn_token_of_the_template_is_an_end_token(bpe_tokenizer):
    bpe_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<unk>\n{% endfor %}"
    assert eos_ids(bpe_tokenizer) == {EOS, UNK}


def test_a_pad_token_that_ends_turns_is_not_used(bpe_tokenizer):
    bpe_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<pad>\n{% endfor %}"
    assert choose_padding_token(bpe_tokenizer) == PaddingToken(UNK, "<unk>", "unk")
