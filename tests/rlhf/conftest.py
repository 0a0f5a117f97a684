"""Models whose replies are known."""

import pytest
from support.scripted_model import TEXT, random_model, scripted_model
from support.tiny_run import save_scorer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def speaking(bpe_folder, tmp_path_factory) -> str:
    """A model that answers TEXT."""
    return scripted_model(bpe_folder, tmp_path_factory.mktemp("speaking"), TEXT)


@pytest.fixture(scope="module")
def endless(bpe_folder, tmp_path_factory) -> str:
    """A model that says 'ab' for ever."""
    return scripted_model(bpe_folder, tmp_path_factory.mktemp("endless"), "ab", ends=False, num_positions=100_000)


@pytest.fixture(scope="module")
def rambling(bpe_folder, tmp_path_factory) -> str:
    """A random model with a padded vocabulary of 408 for the tokenizer's 400 tokens."""
    return random_model(bpe_folder, tmp_path_factory.mktemp("rambling"), vocab_size=408)


@pytest.fixture(scope="module")
def judge(bpe_folder, tmp_path_factory) -> str:
    """A reward model for replies of the others."""
    folder = tmp_path_factory.mktemp("judge")
    save_scorer(folder, PreTrainedTokenizerFast.from_pretrained(bpe_folder))
    return str(folder)
