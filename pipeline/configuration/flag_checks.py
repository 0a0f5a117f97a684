"""Check values beyond their types: names of files and folders, flags that have no effect, and a too long warm-up.

It reads `kind`, `needs`, `read_if` and `excludes` at each flag's field. A configuration checks what joins more values.
"""

import sys
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.configuration.flag_table import Flag, flag_table, flat_items
from pipeline.configuration.groups import Group, OptimizerConfig
from pipeline.configuration.origins import DEFAULT, Origins
from pipeline.errors import counted, dashed
from pipeline.redact import SECRET, redacted, shown_value

# Control characters, and those that turn the direction of the text after them: a log line could read as another one.
STEERING = {"Cc", "Cf"}
WAYS = {"a teacher": "--method distill"}  # model that a run may have -> the flag that gives it one
MAX_VALUES = 1_000_000  # of a file of flags


def unsafe_values(table: Mapping[str, Flag], values: Mapping[str, Any], origins: Origins) -> Iterator[str]:
    """Yield a line for each path that no file can have or that is not what it looks like, and each huge number."""
    for name, flag in table.items():
        number, most = str(values.get(name, "")).lstrip("-"), 18 if "seed" in name else 15
        if isinstance(flag.default, int) and number.isdecimal() and len(number) > most:
            yield f"{dashed(name)}: got {number[:80]} ({origins[name]}), expected a number of at most {most} digits"
        if flag.kind in ("path", "written path"):
            value = values.get(name, "")
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and (problem := path_problem(flag, text)):
                    yield f"{dashed(name)}: got {text[:80]!r} ({origins[name]}): {problem}"


def expanded(content: Any) -> Any:
    """Return the content of a YAML file. Raises ValueError where its aliases stand for more than MAX_VALUES values."""
    sizes = dict[int, int]()

    def size(value: Any) -> int:
        if id(value) not in sizes:
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            sizes[id(value)] = 1 + sum(map(size, parts))
        return sizes[id(value)]

    if size(content) > MAX_VALUES:
        raise ValueError(f"its aliases (*name) stand for more than {MAX_VALUES:,} values; write out fewer")
    return content


def path_problem(flag: Flag, text: str) -> str:
    """Return the reason why a path cannot be used, or ""."""
    categories = {unicodedata.category(character) for character in text}
    if "Cs" in categories:  # a byte that Python could not read
        encoding = sys.getfilesystemencoding()
        return f"not {encoding} text, as this locale has it; set LC_ALL=C.UTF-8, or give a name of ASCII letters"
    if categories & STEERING:
        return "a control character; name a file without it"
    try:
        path = Path(text).expanduser()
        is_file = path.exists() and not path.is_dir()
    except (OSError, RuntimeError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if flag.kind != "written path":
        return ""
    # It is given to mkdir as it is.
    if text.startswith("~"):
        return f"only a shell replaces the ~; give {path}"
    return "a file, expected a folder" if is_file else ""


def secret_values(table: Mapping[str, Flag], values: Mapping[str, Any], origins: Origins) -> Iterator[str]:
    """Yield a line for each flag whose value holds a secret. Free text may: it is written nowhere."""
    for name, value in values.items():
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if table[name].kind != "text" and any(SECRET.search(text) for text in texts):
            yield (
                f"{dashed(name)}: got a token or password ({origins[name]}), which would be written into logs and "
                "config.json; give it to the library as HF_TOKEN, WANDB_API_KEY or in ~/.netrc"
            )


def misplaced_flags(config: Group, values: Mapping[str, Any], origins: Origins) -> Iterator[str]:
    """Yield a line for each given flag of a model that a run of these settings does not have."""
    for name, flag in flag_table(type(config)).items():
        if origins[name].is_given and (model := config.absent(flag)):
            given_value = f"got {shown_value(values[name])} ({origins[name]})"
            way = f", or give {WAYS[model]}" if model in WAYS else ""
            yield f"{dashed(name)}: {given_value}, but this run has no {model[2:]}: leave it out{way}"


def unread_flags(config: Group, origins: Origins) -> Iterator[str]:
    """Yield a line for each flag that differs from its default although `read_if` or `excludes` rules it out."""
    table = flag_table(type(config))
    for name, value in flat_items(config):
        if value == (flag := table[name]).default:
            continue
        excluded = [state for state, is_met in states(flag, flag.excludes, config) if is_met]
        if reason := f"it does not go with {excluded[0]}" if excluded else unmet(flag, flag.read_if, config):
            shown = "a text" if flag.kind == "text" else redacted(repr(value))
            yield f"{dashed(name)}: got {shown} ({origins.get(name, DEFAULT)}): {reason}; leave it out"


def idle_flags(config: Group, origins: Origins, *, on_cpu: bool = False) -> Iterator[str]:
    """Yield a line for each flag that was set and has no effect, with what it needs.

    Args:
        origins: the origin of each value; flags with their default are left out.
        on_cpu: the run computes on a CPU.
    """
    table = flag_table(type(config))
    for name, value in flat_items(config):
        if (origin := origins.get(name, DEFAULT)).is_given:
            lacks_gpu = on_cpu and table[name].needs == "a GPU"
            if reason := "it needs a GPU, got none" if lacks_gpu else unmet(table[name], table[name].needs, config):
                yield f"{dashed(name)} {value} ({origin}): has no effect: {reason}"


def unmet(flag: Flag, condition: str, config: Group) -> str:
    """Return why a flag's condition is not met, "it needs --method grpo, got --method rloo"; "" if it is."""
    parts = dict(states(flag, condition, config))
    return f"it needs {flag.in_words(condition)}, got {', '.join(parts)}" if parts and not any(parts.values()) else ""


def states(flag: Flag, condition: str, config: Group) -> Iterator[tuple[str, bool]]:
    """Yield what a configuration has of each part of a flag's condition, and whether that meets it.

    It is a model that the run may have ("a critic"), or a flag with its value ("--method rloo"). A name without a model
    means the flag of each model.
    """
    if condition.startswith("a "):
        yield from ((model, is_there) for model, is_there in config.models.items() if model == condition)
        return
    table = flag_table(type(config))
    for named in flag.in_words(condition).replace(" or ", " ").split("--")[1:]:
        meant, *allowed = named.split()
        for name, value in flat_items(config):
            if meant.replace("-", "_") in (name, table[name].path[-1]):
                yield f"{dashed(name)} {shown_value(value)}", str(value) in allowed if allowed else bool(value)


def warmup_note(optimizer: OptimizerConfig, total_steps: int) -> str:
    """Return a note if the warm-up is at least as long as the run, else "". total_steps: 0 if not known."""
    problem = f"--num-warmup-steps {optimizer.num_warmup_steps}: the run has {counted(total_steps, 'step')}"
    is_long = 0 < total_steps <= optimizer.num_warmup_steps
    return f"{problem}, so that its learning rate only rises; give less, or more steps" if is_long else ""
