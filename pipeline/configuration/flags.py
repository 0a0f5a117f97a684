"""Make a checked configuration of the command line and YAML files, with the origin of every value.

Which value wins is the order of `Kind` in origins.py; a DeepSpeed JSON that contradicts a higher layer is refused. All
errors are collected and reported together, each with the nearest valid name. Neither torch nor deepspeed is imported,
so that `--help` answers at once.
"""

import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml
from pydantic_core import PydanticUndefined

from pipeline.configuration.ds_json import at_stages, autotuning_file, flags_from_json, overrides, read_user_json
from pipeline.configuration.flag_checks import expanded, misplaced_flags, secret_values, unsafe_values
from pipeline.configuration.flag_table import (
    AUTO,
    ZERO_STAGE,
    Flag,
    Layers,
    flag_table,
    flags_of_key,
    flat_items,
)
from pipeline.configuration.groups import Group
from pipeline.configuration.help import help_text
from pipeline.configuration.names import FILE_FLAGS, IGNORED, Names, normalise, with_switches
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin
from pipeline.configuration.resolved import Resolved, validated
from pipeline.console import HELP, HELP_ALL
from pipeline.errors import InputError, dashed, nearest, raise_lines
from pipeline.files import readable
from pipeline.redact import redacted, repeated, shown_value

TRAIN = "train"  # the section of `rlhf train` itself
PRESET_SECTIONS = ("sft", "reward", "ppo", "dpo")  # those of the files in launch/presets
# Hyphens, en and em dash, minus sign and their full-width forms.
OTHER_DASHES = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]+-*([A-Za-z][\w.-]*(?:=.*)?)", re.DOTALL)


class FlagLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that occurs twice and reads 2e-5 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping like yaml's own method; a key that occurs twice is an error."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if (name := normalise(str(key_node.value))) in seen:
                problem = f"{key_node.value}: occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


TO_INT: Any = yaml.SafeLoader.construct_yaml_int
FlagLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(TO_INT(loader, node))))
FlagLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(path: str) -> dict[Any, Any]:
    """Read the mapping in a YAML file; {} for an empty one. Raises InputError naming the file and the line."""
    try:
        content = expanded(yaml.load(readable(path).read_text(encoding="utf-8"), FlagLoader))
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    except RecursionError:
        raise InputError(f"{path}: not YAML: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{path}: {line}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:  # also of a number of 5,000 digits
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise InputError(f"{path}: got a {type(content).__name__}, expected `flag: value` lines")
    return content or {}


def read_yaml(
    path: str, section: str, sections: Collection[str] = (), *, flags: Container[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Read the flags of `section` from a YAML mapping of flags, or of sections that hold flags.

    Args:
        sections: all that there may be; empty: a stage by itself knows its own, and takes any other mapping for a
            section of another stage, unless it is nearly called like its own or one of its `flags`.

    Returns (flags that can be told all the same, error lines about sections). Raises InputError: see load_yaml.
    """
    content = load_yaml(path)
    # No flag has a mapping for its value.
    mappings = [str(key) for key, value in content.items() if isinstance(value, dict)]
    others = [name for name in mappings if not nearest(name, [TRAIN, section]) and normalise(name) not in flags]
    others += PRESET_SECTIONS  # also `dpo`, for the stage of the section `ppo`
    valid_sections = sections or list(dict.fromkeys([TRAIN, section, *others]))
    unknown = [name for name in mappings if name not in valid_sections]
    errors = [
        f"{path}: {name}: unknown section{nearest(name, valid_sections)}; {', '.join(valid_sections)} are right"
        for name in unknown
    ]
    used = [key for key in content if key in valid_sections]
    bare = {normalise(str(key)): value for key, value in content.items() if key not in (*used, *unknown)}
    if not used:
        return bare, errors
    if bare:
        hint = nearest(min(bare), valid_sections)
        errors.append(
            f"{path}: {', '.join(sorted(bare))}: beside the sections {', '.join(used)}; put flags into a section{hint}"
        )
    values = content.get(section) or {}
    if not isinstance(values, dict):
        return {}, [*errors, f"{path}: {section}: got {values!r}, expected `flag: value` lines"]
    return {normalise(str(key)): value for key, value in values.items()}, errors


def check_dashes(argv: Iterable[str]) -> None:
    """Raise InputError for words that are flags but for their dashes, which word processors and other keyboards make.

    A value that looks like that is written `--flag=value`, as one that starts with `--`.
    """
    matches = filter(None, map(OTHER_DASHES.fullmatch, dict.fromkeys(argv)))
    raise_lines(f"{match[0]}: {match[0][0]!r} begins no flag; write --{match[1]}" for match in matches)


def scan(argv: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (flag name, its words) in order; words before the first flag have the name "".

    A word that starts with `--` is a flag: a value that does so is written `--flag=--value`. Values are never changed.
    """
    name, words = "", list[str]()
    for word in argv:
        if not word.startswith("--"):
            words.append(word)
            continue
        if name or words:
            yield name, words
        name, equals, value = word[2:].partition("=")
        name, words = normalise(name), [value] if equals else []
    if name or words:
        yield name, words


def read_command_line(names: Names, argv: Iterable[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return (given flags, error lines, notes); the last of a repeated flag counts, and a note says so."""
    given: dict[str, Any] = {}
    errors, notes = [], []
    for word, words in scan(argv):
        if word in names.renamed and len(words) < 2:
            value, note = names.renewed(word, *words)
            notes.append(note)
            if not value:
                continue
            words = [value]
        name = word if word in names.switches else names.flag_of.get(word or names.positional, word)
        flag = names.switches.get(name) or names.table.get(name)
        if word in names.ignored and len(words) < 2:
            notes.append(f"{dashed(word)}: {IGNORED}: {names.ignored[word]}")
        elif not word and not flag:
            errors.append(f"got {' '.join(words)!r} before any flag, expected --FLAG VALUE")
        elif not flag and name not in (*FILE_FLAGS, *names.ignored):
            errors.append(f"{dashed(name)}: {names.unknown(name, FILE_FLAGS, dashed)}")
        elif problem := wrong_count(flag, words, names.positional if word else ""):
            errors.append(f"{dashed(word or name)}: {problem}")
        else:
            if name in given:
                notes.append(repeated(dashed(name), given[name]))
            is_list = flag is not None and flag.is_list
            ended = flag.switches if flag and is_list else ()
            given = {key: value for key, value in given.items() if key not in ended}
            given[name] = words if is_list else words[0] if words else "true"
    return given, errors, notes


def wrong_count(flag: Flag | None, words: list[str], positional: str) -> str:
    """Return the error in the words after a flag (None: --preset or --config), some for `positional` perhaps, or ""."""
    if flag and flag.is_bool and not words:
        return ""
    if not words:
        return f"got no value, expected {flag.type_name if flag else 'a file'}"
    if len(words) > 1 and not (flag and flag.is_list):
        first = f", and {dashed(positional)} comes before other flags" if positional else ""
        return f"got {len(words)} values ({' '.join(words)}), expected one; quote a value with spaces{first}"
    return ""


def parse(
    config_class: type[Group],
    argv: list[str],
    *,
    section: str,
    sections: Collection[str] = (),
    prog: str = "",
    help_maker: Callable[..., str] = help_text,
) -> Resolved:
    """Resolve the configuration of a stage from its command line. `--help [TOPIC]`, `--help-all` exit with 0.

    Args:
        section: the stage's section in YAML files: sft, reward, ppo, or train for `rlhf train` itself.
        sections: all that a YAML file may have; see `read_yaml`.

    Raises:
        InputError: every wrong name and value of the command line and the files, one per line.
    """
    if not {*HELP, *HELP_ALL}.isdisjoint(argv):
        print(help_maker(config_class, prog or section, argv), flush=True)
        raise SystemExit(0)
    check_dashes(argv)
    names = Names(config_class)
    given, errors, notes = read_command_line(names, argv)
    layers, preset = [], str(given.get("preset", ""))
    for kind, path in [(kind, given.pop(key)) for key, kind in FILE_FLAGS.items() if key in given]:
        try:
            flags, about_sections = read_yaml(path, section, sections, flags=names.flag_of)
        except InputError as error:
            errors.append(str(error))
            continue
        values, about_flags, more_notes = names.of_file(path, flags)
        errors += [*about_sections, *about_flags]
        notes += more_notes
        layers.append((Origin(kind, path), values))
    layers = config_class.with_method([*layers, (COMMAND_LINE, given)])
    resolved = resolve_layers(config_class, layers, errors)
    return replace(resolved, notes=(*notes, *resolved.notes), preset=preset)


def resolve_layers(config_class: type[Group], layers: Layers, errors: list[str]) -> Resolved:
    """Merge (origin, values by flag) layers, later ones winning, and check the result.

    Raises:
        InputError: `errors` and all errors of the values, one per line.
    """
    table = flag_table(config_class)
    errors = list(errors)
    origins = dict.fromkeys(table, DEFAULT)
    values = {name: flag.default for name, flag in table.items() if flag.default is not PydanticUndefined}
    for origin, layer in layers:
        layer = with_switches(layer, table, values, errors, str(origin))
        ended = {table[name].instead_of for name in layer} & (values.keys() - layer.keys())
        ended = {name for name in ended if origins[name].is_given}
        left = {name for name, value in layer.items() if table[name].takes_auto and value == AUTO}
        values |= layer | {name: table[name].default for name in (*ended, *left)}
        origins |= dict.fromkeys([*layer, *ended], origin) | dict.fromkeys(left, DEFAULT)
    errors += [*secret_values(table, values, origins), *unsafe_values(table, values, origins)]
    config, notes, kind = None, list[str](), InputError
    try:
        config = validated(config_class, values, origins)
        errors += misplaced_flags(config, values, origins)
        if path := values.get("deepspeed_config"):
            config, notes = with_deepspeed_json(config, origins, str(path))
    except InputError as error:
        kind = InputError if errors else type(error)
        errors += str(error).splitlines()
    if errors:
        raise kind(redacted("\n".join(errors)))
    return Resolved(config, origins, tuple(notes))


def with_deepspeed_json(config: Group, origins: dict[str, Origin], path: str) -> tuple[Group, list[str]]:
    """Set the flags that the user's DeepSpeed JSON names; `origins` gets the file's name for each of them.

    Returns (configuration, what the file changes, a line each).

    Raises:
        InputError: the JSON is not usable, or says something else than a flag that was given.
    """
    table, values, errors = flag_table(type(config)), dict(flat_items(config)), []
    whole, changed = read_user_json(path), list[str]()
    said, file = flags_from_json(whole, table), Origin(Kind.DEEPSPEED_JSON, path)
    stage_flags = flags_of_key(type(config), ZERO_STAGE)
    stages = {said[name][1] if name in said else values[name] for name in stage_flags}
    user, unread = at_stages(whole, stages)
    before = {name: shown_value(value) for name, value in values.items()}
    for name, (key, value) in flags_from_json(user, table, dtype=values["dtype"]).items():
        if values[name] == value:
            origins[name] = COMMAND_LINE if origins[name] == COMMAND_LINE else file  # nothing is chosen against it
            continue
        if origins[name] == DEFAULT or values[name] == AUTO:
            changed.append(name)
            values[name], origins[name] = value, file
        else:
            errors.append(
                f"{path}: {key}: got {shown_value(value)}, but {dashed(name)} is {before[name]} ({origins[name]});"
                ' make them equal, or write "auto" into the JSON'
            )
    raise_lines(errors)
    config = validated(type(config), values, origins)
    now = dict(flat_items(config))
    changes = {name: f"{shown_value(now[name])} (was {before[name]})" for name in changed}
    notes = list(overrides(user, table, changes, dtype=now["dtype"]))
    if unread:
        is_open = any(name not in said and origins[name] == DEFAULT for name in stage_flags)
        where = f"{' and '.join(map(str, sorted(stages)))}{'; on GPUs the plan may choose another' if is_open else ''}"
        notes.append(f"{', '.join(unread)}: no effect at ZeRO stage {where}")
    return config, [f"{path}: {line}" for line in notes]


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return `--name value` of each flag, as a command line has them."""
    values = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in flags.items()}
    return [word for name, value in values.items() for word in (dashed(name), value)]


def stage_arguments(argv: list[str] | None) -> list[str]:
    """Return the process's own arguments where a `main` is called without any."""
    return [autotuning_file(word) for word in (sys.argv[1:] if argv is None else argv)]
