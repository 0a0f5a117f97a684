"""A flag is one field of a configuration model, and `flag_table` lists the flat flags of a whole model.

The field says all there is to know of the flag: see `flag`. Help, reference, YAML, the checks of paths and secrets, the
resume check and DeepSpeed's JSON loop over the table.
"""

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.configuration.origins import Origin
from pipeline.errors import dashed

Kind = Literal["plain", "path", "written path", "text"]
OnResume = Literal["same", "rounding", "data", "model", "output", "free"]
# A GPU, a model that a run may lack, or flags; see `Rules`.
Condition = Annotated[str, Field(pattern=r"^(a (GPU|critic|teacher|reward model)|--\w.*)?$")]
# Words that a definition may also give as one text, with spaces between them.
Words = Annotated[tuple[str, ...], BeforeValidator(lambda given: given.split() if isinstance(given, str) else given)]
Layers = list[tuple[Origin, dict[str, Any]]]  # (origin, values by flag), a later one is stronger
# Arguments of `flag` that are pydantic's own checks.
CHECKS = {"ge", "gt", "le", "lt", "min_length", "max_length"}
ZERO_STAGE = "zero_optimization.stage"  # the key of a DeepSpeed JSON that the flags of the ZeRO stage set
AUTO = "auto"


class Removed(NamedTuple):
    """A flag that is gone: the default that it had, the last commit that has it, and what to do instead."""

    default: Any
    last: str
    instead: str

    @property
    def reason(self) -> str:
        """The words for somebody who gives the flag, or whose checkpoint has it."""
        return f"removed after commit {self.last}: {self.instead}"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of a flag besides type, default and meaning; a wrong name or value is an error at import.

    kind: path: the name of a file or folder; written path: a folder that a run makes; text: a user's own words, which
    are written nowhere and may hold anything.
    on_resume: same: a resumed run needs the value that its checkpoint was written under; rounding: another value
    changes how the work is cut, and numbers by rounding only; data, model: compared by the content of the sources or
    the start model that it names; output: another value changes the model that a run leaves, not what it learns, so
    only a finished run needs the same; free: another value changes neither.
    read_if: the condition under which a run reads the flag: another value than the default is refused without it.
    excludes: the condition under which another value than the default is refused.
    needs: the condition without which the flag has no effect, of which a note warns; where it is a model, the flag is
        refused, whatever its value. A condition is "a critic" or another model, or flags as users know them:
        "--kl-target" (neither 0, false nor empty), "--method grpo or rloo", "--kl-coef or --log-kl". In the flags of a
        model it means that model's.
    deepspeed: the dotted keys of a DeepSpeed JSON that say the same; a single one may be given as a text.
    aliases: further names of the flag.
    other_tools: its names in TRL and LLaMA-Factory, given with spaces between them; they are refused with this flag's
    name.
    ignored: flags of DeepSpeed-Chat that change nothing here, and why; they are accepted with a note.
    refused: flags of other programs without a counterpart, and what to do instead.
    removed: flags of earlier versions, and what to do instead; they are refused, and so is a checkpoint that has one at
    another value than its default.
    renamed: flags of earlier versions whose values are words of this one: name -> value -> the word now. They are
    accepted with a note.
    instead_of: a weaker setting of that flag ends where this one is given.
    switches: of a list of words: names of flags that are true or false, and the word that each adds or takes out.
    positional: words before the first flag of a command line are its values.
    required: its empty default is refused where the command starts; help shows it as required.
    per_stage: one value is not right for several stages: `rlhf train` takes it for a single one.
    auto: where it is not given, or is `auto`, the plan of a run on GPUs chooses the value; the default is a CPU's.
    auto_is: where it is not given, or is `auto`, the run chooses the value by other flags: these words say how.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    kind: Kind = "plain"
    on_resume: OnResume = "same"
    read_if: Condition = ""
    excludes: Condition = ""
    needs: Condition = ""
    deepspeed: Words = ()
    aliases: tuple[str, ...] = ()
    other_tools: Words = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, Removed] = field(default_factory=dict)
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    instead_of: str = ""
    switches: Mapping[str, str] = field(default_factory=dict)
    positional: bool = False
    required: bool = False
    per_stage: bool = False
    auto: bool = False
    auto_is: str = ""


RULES = TypeAdapter(Rules)


def flag(default: Any, meaning: str, **given: Any) -> Any:
    """Define a flag: return the field of a pydantic model.

    Args:
        default: `...` where the flag is required.
        meaning: the help text; it says what 0 and an empty value stand for.
        given: `Rules`, and pydantic's own CHECKS.
    """
    checks = {name: given.pop(name) for name in CHECKS & given.keys()}
    rules: Any = vars(RULES.validate_python(given))
    return Field(default, description=meaning, json_schema_extra=rules, **checks)


def zero3_size(key: str, meaning: str) -> Any:
    """Define a flag that counts elements under ZeRO stage 3, named as its `key` of DeepSpeed's zero_optimization."""
    where = {"deepspeed": f"zero_optimization.{key}", "needs": "--zero-stage 3"}
    return flag(1_000_000_000, meaning, ge=1, on_resume="rounding", **where)


@dataclass(frozen=True, kw_only=True)
class Flag(Rules):
    """One leaf field of a configuration: its place and definition, and its rules.

    name: flat name of the flag, without dashes.
    path: names of the groups that lead to the field, and its name.
    group: heading of the field's group in help and reference.
    info: pydantic's definition of the field.
    default: value where nothing is given.
    """

    name: str
    path: tuple[str, ...]
    group: str
    info: FieldInfo
    default: Any

    @property
    def shown(self) -> str:
        """The flag as help and pages show it: `--model` for model_name_or_path, which has that short name too."""
        short = self.name.removesuffix("_name_or_path")
        return dashed(short if short in self.aliases else self.name)

    def in_words(self, condition: str) -> str:
        """Return a condition of the flag as help and messages have it, with the flags of its model."""
        return condition.replace("--", dashed(self.name.removesuffix(self.path[-1])))

    @property
    def limits(self) -> str:
        """The words on its conditions: "only with --method grpo or rloo, not with a reward model"; "" without."""
        only, never = self.in_words(self.read_if or self.needs), self.in_words(self.excludes)
        return ", ".join(filter(None, (only and f"only with {only}", never and f"not with {never}")))

    @property
    def meaning(self) -> str:
        """The help text, with when the flag is read and its further names."""
        also = ", ".join(name for name in map(dashed, (self.name, *self.aliases)) if name != self.shown)
        switches = ", ".join(map(dashed, self.switches))
        adds = f"{switches} true|false adds to it or takes from it"
        remarks = filter(None, (self.limits, also and f"also {also}", switches and adds))
        return (self.info.description or "") + "".join(f" ({remark})" for remark in remarks)

    @property
    def takes_auto(self) -> bool:
        return self.auto or bool(self.auto_is)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.info.annotation) is list

    @property
    def is_bool(self) -> bool:
        return self.info.annotation is bool

    @property
    def value_type(self) -> Any:
        """The type of the value, or of a list's items, without the checks."""
        inner = typing.get_args(self.info.annotation)[0] if self.is_list else self.info.annotation
        return typing.get_args(inner)[0] if typing.get_origin(inner) is Annotated else inner

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words of a Literal, or of a list of Literals."""
        return typing.get_args(self.value_type) if typing.get_origin(self.value_type) is Literal else ()

    @property
    def type_name(self) -> str:
        """The type as help and reference show it: `int`, `true|false`, `bf16|fp16`, `str ...` for a list."""
        if self.is_bool:
            return "true|false|auto" if self.auto else "true|false"
        name = "|".join(map(str, self.choices)) or self.value_type.__name__
        return f"{name} ..." if self.is_list else f"{name}|auto" if self.takes_auto else name

    @property
    def shown_default(self) -> str:
        """The default as a user would type it; `none` for an empty value."""
        if self.default is PydanticUndefined or self.required:
            return "required"
        if self.takes_auto:
            return f"auto; {self.auto_is or f'on a CPU {str(self.default).lower()}'}"
        if self.is_bool:
            return str(self.default).lower()
        words = map(str, self.default) if isinstance(self.default, list) else [str(self.default)]
        return " ".join(words) or "none"


def is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def flag_table(config_class: type[BaseModel]) -> Mapping[str, Flag]:
    """Return {flat name: Flag}, which nobody changes.

    The flags of a model begin with its role, the field's name, but for the only `model` of a stage. Without the role
    the first model is meant, unless one value is not right for several stages, and so for several models.
    """
    return _flag_table(config_class)


@cache  # not the function above: a type checker takes some classes of configurations for unhashable
def _flag_table(config_class: type[BaseModel]) -> Mapping[str, Flag]:
    roles = [name for name, info in config_class.model_fields.items() if getattr(info.annotation, "has_role", False)]
    table: dict[str, Flag] = {}
    for name, info in config_class.model_fields.items():
        if is_group(info.annotation):
            prefixed = name in roles and name != "model"
            table |= group_flags(name, info, prefixed=prefixed, is_first=[name] == roles[:1])
        else:
            default = info.get_default(call_default_factory=True)
            table[name] = Flag(name=name, path=(name,), group="General", info=info, default=default, **rules_of(info))
    return MappingProxyType(table)


def group_flags(name: str, info: FieldInfo, *, prefixed: bool, is_first: bool) -> dict[str, Flag]:
    """Return the flags of one group field, with its name before theirs if `prefixed`."""
    group: Any = info.annotation
    title = (group.__doc__ or name).strip().splitlines()[0]
    flags = {}
    for leaf, leaf_info in group.model_fields.items():
        rules = rules_of(leaf_info)
        flat = f"{name}_{leaf}" if prefixed else leaf
        shown = f"{title} ({name})" if prefixed else title
        if prefixed:
            other_names = rules.get("aliases", ())
            is_clear = is_first and not rules.get("per_stage")
            aliases = [f"{name}_{alias}" for alias in other_names] + ([leaf, *other_names] if is_clear else [])
            # The other models may start as the first one does.
            rules = rules | {"aliases": tuple(aliases), "required": is_first and bool(rules.get("required"))}
        default = getattr(info.default, leaf)
        flags[flat] = Flag(name=flat, path=(name, leaf), group=shown, info=leaf_info, default=default, **rules)
    return flags


def flags_of_key(config_class: type[BaseModel], key: str) -> list[str]:
    """Return the flags that set `key` of a DeepSpeed JSON; stage 3 has one for each of its two models."""
    return [name for name, flag in flag_table(config_class).items() if key in flag.deepspeed]


def rules_of(info: FieldInfo) -> dict[str, Any]:
    """Return the rules that `flag` stored in a field; {} for a plain pydantic field."""
    rules: Any = info.json_schema_extra or {}
    return rules


def flat_items(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """Yield (flag name, value) of a configuration."""
    for flag in flag_table(type(config)).values():
        value: Any = config
        for part in flag.path:
            value = getattr(value, part)
        yield flag.name, value


def nest(values: Mapping[str, Any], table: Mapping[str, Flag]) -> dict[str, Any]:
    """Nest flat values into the mapping that the model validates."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = table[name].path
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[leaf] = convert(value, table[name])
    return nested


def convert(value: Any, flag: Flag) -> Any:
    """Convert what people write for a type: a word or none for a list, 5e8 for an int, a number for a text.

    A mapping in a YAML file's list becomes the text of a JSON object.
    """
    if flag.is_list and isinstance(value, list):
        value = [json.dumps(item) if isinstance(item, dict) else item for item in value]
    if flag.is_list and flag.choices and value in ("none", ["none"]):
        return []
    if flag.is_list and isinstance(value, str | int | float):
        return [value]
    if flag.info.annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if flag.info.annotation is int and isinstance(value, str) and "e" in value.lower():
        try:
            return int(float(value)) if float(value).is_integer() else value
        except (ValueError, OverflowError):
            return value
    return value
