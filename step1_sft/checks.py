"""Check stage 1 before it reads any row or weight: the start model, the flags that must fit it, and packages."""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec

from pipeline.engine.start_models import Check, StartModel, check_settings, package_checks
from pipeline.errors import EnvironmentFault, InputError, raise_lines
from pipeline.models.forward.packed_attention import check_packing
from pipeline.models.paths import check_language_model
from pipeline.models.source import ModelSource, check_positions
from step1_sft.config import SFTConfig

# Packages that compute the values of --eval-metric. They are not among the requirements.
PACKAGES = {"bleu": "sacrebleu", "rouge": "rouge_score"}
# Reasons why stage 1 cannot train some encoder-decoder types.
CODES = "needs language codes, which the rows do not have"
OWN_WAYS = "shifts its labels or masks its source differently from T5"
UNSUITABLE = dict.fromkeys(("m2m_100", "mbart", "nllb-moe", "plbart"), CODES) | dict.fromkeys(
    ("blenderbot", "blenderbot-small", "fsmt", "prophetnet"), OWN_WAYS
)


def start_models(config: SFTConfig, base_of_output: Mapping[str, str]) -> list[StartModel]:
    """Return the start model with its checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    data, path = config.data, config.model.model_name_or_path
    start = ModelSource(base_of_output.get(path, path))
    fits: list[Check] = [partial(check_positions, start, data.max_seq_len, "--max-seq-len")]
    if config.eval_metric != "loss":
        longest = data.max_seq_len + config.eval_max_new_tokens
        fits.append(partial(check_positions, start, longest, "--max-seq-len + --eval-max-new-tokens"))
    if data.packing:
        fits.append(partial(check_packing, start, "--packing"))
    fits += [
        partial(check_seq2seq, config, start),
        partial(check_settings, start, config.model, only_lora=config.deepspeed.only_optimize_lora),
    ]
    packages: list[Check] = [
        *package_checks(config, config.model),
        partial(check_metric, config.eval_metric),
    ]
    return [StartModel("--model-name-or-path", path, start, check_language_model, packages, fits)]


def check_seq2seq(config: SFTConfig, source: ModelSource) -> None:
    """Raise InputError for an encoder-decoder model that stage 1 cannot train, or for flags that do not apply."""
    if not source.is_encoder_decoder:
        return
    check_labels(source)
    kind, fp16 = source.config.model_type, config.deepspeed.dtype == "fp16"
    refused = (
        (config.data.packing, "--packing", "an encoder reads one row at a time; leave it out"),
        (config.data.train_on_prompt, "--train-on-prompt", "the prompt is the encoder's input; leave it out"),
        (fp16 and kind.endswith("t5"), "--dtype fp16", f"{kind} overflows in fp16; give bf16 or fp32"),
    )
    raise_lines(f"{flag}: {reason}" for given, flag, reason in refused if given)


def check_labels(source: ModelSource) -> None:
    """Raise InputError for an encoder-decoder model whose decoder cannot read labels shifted by one position."""
    config, path = source.config, source.path
    if reason := UNSUITABLE.get(kind := config.model_type):
        raise InputError(
            f"--model-name-or-path {path}: {kind} {reason}; give T5, FLAN-T5, mT5, BART, Pegasus or Marian"
        )
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name, None) is None and kind != "t5gemma":  # its decoder begins with bos_token_id
            raise InputError(
                f"--model-name-or-path {path}: config.json has no {name}, which the decoder reads before or "
                "after the labels; add it (for BERT: the ids of [CLS] and [PAD])"
            )


def check_metric(metric: str) -> None:
    """Raise EnvironmentFault for an `--eval-metric` whose package is not installed."""
    package = PACKAGES.get(metric)
    if package and find_spec(package) is None:
        install = "pip install '.[metrics]' in the project's folder"
        raise EnvironmentFault(f"--eval-metric {metric}: needs {package}; {install}")
