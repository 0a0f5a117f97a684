"""Check a model folder by config.json and the headers of its weights, before any weight is read.

The module imports no torch, except to read a `.bin` file.

Hub ids pass: their files are not here yet, and `loading.py` lets transformers read them under the same rules.
"""

import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from pipeline.errors import InputError
from pipeline.files import CONFIG_FILES, OURS, warn_of_links
from pipeline.model_types import MODEL_TYPES, declared
from pipeline.models.paths import at_flag, check_model_path, read_adapter_config, read_config, reading_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Names of weights with one row per token.
EMBEDDINGS = (
    ".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight", ".shared.weight"
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "spm.model", "tekken.json",
)  # fmt: skip
# Those that llama.cpp's converters of Gemma, Phi-3, Llama 2 and T5 read, beside tokenizer.json.
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# Fields of a config.json, at any depth, of what a model reads besides text.
TOWERS = ("vision_config", "vq_config", "audio_config", "audio_encoder_config", "speech_encoder_layers")
# Fields of config.json that are sizes; the deepest published models have about 200 layers.
SIZE = re.compile(r"(^d_\w+|size|dim|inner|heads?|layers?|positions|embeddings|experts|n_embd)$")
MAX_LAYERS = 1000
# Private fields of config.json that carry no behaviour; `layer_types` replaces the last.
HARMLESS_FIELDS = ("_name_or_path", "_commit_hash", "_sliding_window_pattern")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once, though a model's folder is checked more than once in a run."""
    log.warning("%s", message)


def check_model_files(path: str, flag: str = "", *, pickles: bool = True) -> None:
    """Refuse a folder that cannot be loaded, or should not be, before transformers reads it.

    Args:
        flag: the flag that the message names.
        pickles: True allows `.bin` files, which are read with weights_only and a warning.

    Raises:
        InputError: no folder or hub id; a broken config.json; code of its own; weights missing, cut short, or in
            shapes that config.json contradicts.
    """
    check_model_path(path, flag)
    folder = Path(path).expanduser()
    warn_of_links(folder)
    if (adapter := read_adapter_config(folder)) is not None:
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise InputError(f"{at_flag(flag)}{path}: an adapter without {ADAPTER_WEIGHTS}; no pickle is read here")
        read_shapes(folder / ADAPTER_WEIGHTS)
        base = adapter["base_model_name_or_path"]
        if read_adapter_config(Path(base).expanduser()) is not None:
            raise InputError(f"{at_flag(flag)}{path}: its base {base} is an adapter itself; merge that one first")
        named = f"{at_flag(flag)}{folder / CONFIG_FILES[1]}: base_model_name_or_path"
        check_model_files(base, named, pickles=pickles)
    elif folder.is_dir():
        config = read_config(folder)
        check_code(folder, config, flag)
        check_weights(folder, config, flag, pickles=pickles)


def check_plain_lora(path: str) -> None:
    """Raise InputError if the adapter folder `path` holds more than matrices A and B, which the sampler merges."""
    others = [
        name
        for name in read_shapes(Path(path).expanduser() / ADAPTER_WEIGHTS)
        if not name.endswith((".lora_A.weight", ".lora_B.weight", "score.weight"))
    ]
    if others:
        raise InputError(
            f"{path}: an adapter with more than LoRA's A and B ({others[0]}) is not trained on; rlhf merge {path} "
            "FOLDER makes a whole model to start from"
        )


def check_code(folder: Path, config: Mapping[str, Any], flag: str = "") -> None:
    """Raise InputError for a model that needs code from its folder; a class that transformers has needs none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    has_class = isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES
    if code := config.get("auto_map"):
        named = sorted({str(ref).partition(".")[0] for ref in (code.values() if isinstance(code, dict) else [code])})
        files = ", ".join(str(folder / f"{name.rpartition('--')[2]}.py") for name in named)
        if not has_class:
            raise InputError(f"{at_flag(flag)}{folder}: needs code of its own ({files}), which is never run here")
        warn_once(f"{folder}: its code ({files}) is not run; transformers' own class is used")


def warn_if_untested(path: str, kind: str) -> None:
    """Warn of a model whose type no test trains; one that a stage wrote was warned of where it entered."""
    if kind not in MODEL_TYPES and not (Path(path).expanduser() / OURS).is_file():
        warn_once(f"{path}: model type {kind} is untested here; {', '.join(MODEL_TYPES)} are tested")


def check_text_model(path: str, config: "PretrainedConfig", raw: Mapping[str, Any]) -> None:
    """Raise InputError for a model that is not for text alone, does not generate it, or would run code from the hub.

    Args:
        config: configuration that transformers made of `raw`, the content of config.json.
    """
    from transformers.models.auto import modeling_auto as auto

    if fields := list(kernel_fields(raw)):
        raise InputError(f"{path}: config.json: {fields[0]}: code from the hub is never run; remove the field")
    kind = config.model_type
    declared_fields = getattr(type(config), "__dataclass_fields__", ())
    # Fuyu's tower is a linear layer without a configuration of its own.
    towers = (path for path, name, _ in fields_within(raw) if name in TOWERS)
    if field := next(towers, "image_size" if "image_size" in declared_fields else ""):
        tower = "audio" if "audio" in field or "speech" in field else "vision"
        raise InputError(
            f"{path}: {kind} has {'an' if tower == 'audio' else 'a'} {tower} tower (config.json: {field}); only text "
            "decoders are trained here: give a checkpoint of the language model alone"
        )
    if "chunked_attention" in (declared(config, "layer_types") or ()):
        raise InputError(
            f"{path}: layers of {kind} attend within chunks (config.json: attention_chunk_size); take another model"
        )
    if declared(config.get_text_config(), "use_bidirectional_attention") in (True, "all"):
        raise InputError(
            f"{path}: a token of {kind} sees later ones (config.json: use_bidirectional_attention); take another model"
        )
    classes: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        classes = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    # transformers has a causal class for most encoders, too, which sees the tokens that follow unless this is set;
    # XLNet's does so in any case.
    elif kind == "xlnet" or (
        type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    ):
        classes = ()
    if type(config) not in classes:
        raise InputError(
            f"{path}: {kind} does not generate text from left to right (encoders such as BERT do not); give a language "
            "model (OPT, Llama, Qwen, ...)"
        )


def check_sizes(path: str, config: "PretrainedConfig") -> None:
    """Raise InputError for sizes that no model has, of which building one would fail, or never end."""
    for name, value in vars(config.get_text_config()).items():
        most = MAX_LAYERS if "layer" in name else 2**31
        if SIZE.search(name) and isinstance(value, int) and not 0 <= value <= most:
            raise InputError(f"{path}: config.json: got {name} {value}, expected 0 to {most}")


def fields_within(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, name, value) of the fields of a config.json at any depth, each before those within it."""
    for name, value in config.items():
        yield path + name, name, value
        if isinstance(value, Mapping):
            yield from fields_within(value, f"{path}{name}.")


def kernel_fields(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields of a config.json, at any depth, that name an attention or expert implementation from the hub.

    transformers would fetch and run that code (CVE-2026-4372 and its kin).
    """
    for path, name, value in fields_within(config):
        if "implementation" in name:
            named = value.values() if isinstance(value, Mapping) else [value]
            if any(isinstance(text, str) and not text.replace("_", "").isalnum() for text in named):
                yield f"{path} {value!r}"


def check_weights(folder: Path, config: Mapping[str, Any], flag: str = "", *, pickles: bool = True) -> None:
    """Raise InputError for weights that are missing, cut short or contradict config.json."""
    files = weight_files(folder, flag)
    if not files:
        files = weight_files(folder, flag, PICKLED, PICKLED_INDEX) if pickles else []
        if not files:
            extra = "; a pickle (.bin, .pt) is not read here" if any(folder.glob("*.bin")) else ""
            raise InputError(f"{at_flag(flag)}{folder} holds no weights (no {WEIGHTS}){extra}")
        warn_once(f"{folder}: no safetensors; {PICKLED} is read with weights_only")
    has_codes = bool(config.get("quantization_config"))
    shapes = {name: shape for file in files for name, shape in read_shapes(file, has_codes=has_codes).items()}
    inner = config.get("text_config")
    sizes = [source.get("vocab_size") for source in (config, inner if isinstance(inner, Mapping) else {})]
    vocab_size = next((size for size in sizes if isinstance(size, int)), None)
    for name, shape in shapes.items():
        if f".{name}".endswith(EMBEDDINGS) and shape and vocab_size is not None and shape[0] != vocab_size:
            raise InputError(
                f"{at_flag(flag)}{folder}: config.json says vocab_size {vocab_size}, but {name} has {shape[0]} rows; "
                "take config.json and weights from the same model"
            )


def weight_files(folder: Path, flag: str = "", whole: str = WEIGHTS, parts: str = WEIGHTS_INDEX) -> list[Path]:
    """Return the safetensors files of a model folder, or those of other names; none where there are none.

    Raises InputError for an index that names missing files.
    """
    if (folder / whole).is_file():
        return [folder / whole]
    index = folder / parts
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{at_flag(flag)}{index}: cannot be read as an index of weights") from None
    if missing or not names:
        raise InputError(f"{at_flag(flag)}{index}: {len(missing)} of its {len(names)} files are missing: {missing[:1]}")
    return [folder / name for name in names]


def read_shapes(file: Path, *, has_codes: bool = False) -> dict[str, list[int]]:
    """Return the shape of each tensor of a safetensors file, by its header, or of a `.bin` file.

    Args:
        has_codes: True allows weights that are no floating-point numbers.

    Raises:
        InputError: a broken file, or weights of a type that would be cast to other values.
    """
    shapes, types = read_pickle(file) if file.suffix == ".bin" else read_header(file)
    if not has_codes:
        check_types(file, {name: (len(shape), types[name]) for name, shape in shapes.items()})
    return shapes


def read_header(file: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the shapes and types of the tensors of a safetensors file. Raises InputError for a broken one."""
    try:
        with file.open("rb"), safetensors.safe_open(file, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            shapes = {name: part.get_shape() for name, part in parts.items()}
            return shapes, {name: part.get_dtype() for name, part in parts.items()}
    except (OSError, safetensors.SafetensorError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from None
        size = file.stat().st_size
        raise InputError(f"{file}: cut short or no safetensors file ({size} bytes: {error}); fetch it again") from None


def read_pickle(file: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the shapes and types of the tensors of a `.bin` file, as transformers will load it, with weights_only.

    The values of a file that torch 1.6 or later wrote stay on the disk. Raises InputError for a broken file.
    """
    from transformers.modeling_utils import load_state_dict

    try:
        weights = load_state_dict(file, weights_only=True)
        shapes = {name: [*value.shape] for name, value in weights.items()}
        return shapes, {name: str(value.dtype).removeprefix("torch.") for name, value in weights.items()}
    except Exception as error:
        raise reading_error(str(file), "cannot load the model", error) from error


def check_types(file: Path, tensors: Mapping[str, tuple[int, str]]) -> None:
    """Raise InputError for a weight that is no floating-point number. Values: number of dimensions and data type.

    Masks and positions, which files of older versions hold, are not called weights.
    """
    for name, (num_dimensions, kind) in tensors.items():
        is_weight = name.endswith("weight") or (name.endswith(".bias") and num_dimensions == 1)
        if is_weight and not kind.lower().startswith(("f", "bf")):
            raise InputError(
                f"{file}: {name} is stored as {kind}, not as floating-point numbers, and nothing says what its numbers "
                "mean; take a checkpoint in 16 or 32 bits"
            )
