"""Do a model, its tokenizer and the wanted lengths go together? Answered before any weight is read."""

from typing import Any

from pipeline.errors import InputError
from pipeline.models.loading import load_config, num_positions
from pipeline.models.weight_files import check_model_files, warn_once


def check_model(path: str, flag: str = "") -> None:
    """Refuse a model that cannot be loaded, as far as its files' names, headers and config.json tell.

    Raises:
        InputError: as check_model_files and load_config. EnvironmentFault: the hub cannot be reached.
    """
    check_model_files(path, flag)
    load_config(path)


def check_positions(path: str, longest: int, flag: str) -> None:
    """Raise InputError where sequences of `longest` tokens (the value of `flag`) do not fit into the model at `path`.

    Reads config.json alone.
    """
    limit = num_positions(load_config(path))
    if limit is not None and longest > limit:
        raise InputError(f"{flag} {longest}: the model {path} has {limit} positions; {flag} {limit} is the most")


def check_vocabulary(path: str, tokenizer: Any) -> None:
    """Raise InputError for a tokenizer with ids that the model at `path` has no row for; warn of another EOS.

    More rows than ids are fine: published models pad their vocabulary. Reads config.json alone.
    """
    config = load_config(path).get_text_config()
    size, largest = getattr(config, "vocab_size", None), max(tokenizer.get_vocab().values(), default=-1)
    if size is not None and largest >= size:
        raise InputError(
            f"{path}: its tokenizer has ids up to {largest}, but the model's vocabulary has {size} rows: they do not "
            "belong together; copy the tokenizer files from the folder that the weights came from"
        )
    said = getattr(config, "eos_token_id", None)
    ends = [said] if isinstance(said, int) else said or []
    if ends and tokenizer.eos_token_id not in ends:
        warn_once(
            f"{path}: config.json ends texts with id {ends}, the tokenizer with {tokenizer.eos_token_id} "
            f"({tokenizer.eos_token}); the tokenizer's is trained"
        )
