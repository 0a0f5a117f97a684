"""Models whose replies are known."""

import pytest
from support.scripted_model import TEXT, random_model, scripted_model


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
