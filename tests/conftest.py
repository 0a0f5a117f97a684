"""Fixtures that several test files share: no download, nothing large."""

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TRAINING_TEXT = (
    "\n\nHuman: What is the capital of France?\n\nAssistant: The capital of France is Paris.",
    "\n\nHuman: How do I make tea?\n\nAssistant: Boil water, add the leaves and wait for four minutes.",
    "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow.",
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data and tokenizers that RLHF_TEST_DATA names."""
    folder = os.environ.get("RLHF_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set RLHF_TEST_DATA to the folder with the real data (preference/, instruct/, tokenizers/, ...)")
    return Path(folder)


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved byte-level BPE tokenizer of 400 tokens: <pad> 0, <s> 1, </s> 2, <unk> 3; it adds no BOS, has no template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    folder = tmp_path_factory.mktemp("bpe")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def bpe_tokenizer(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """A fresh copy of the tokenizer in `bpe_folder`, free to be given a template."""
    return PreTrainedTokenizerFast.from_pretrained(bpe_folder)
