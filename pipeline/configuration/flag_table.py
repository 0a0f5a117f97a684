"""The flat flags of a configuration model, and the conversions that a flag's type allows."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


@dataclass(frozen=True, slots=True)
class Flag:
    """One leaf field of a configuration: its flat name, its path in the model, and its definition."""

    name: str
    path: tuple[str, ...]
    group: str
    info: FieldInfo
    default: Any

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.info.annotation) is list

    @property
    def is_bool(self) -> bool:
        return self.info.annotation is bool

    @property
    def value_type(self) -> Any:
        """The type of the value, or of a list's items, without its checks."""
        inner = typing.get_args(self.info.annotation)[0] if self.is_list else self.info.annotation
        return typing.get_args(inner)[0] if typing.get_origin(inner) is Annotated else inner

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words of a Literal, or of a list of Literals."""
        return typing.get_args(self.value_type) if typing.get_origin(self.value_type) is Literal else ()

    @property
    def type_name(self) -> str:
        """What a value looks like, for help and reference: `int`, `true|false`, `bf16|fp16`, `str ...` for a list."""
        if self.is_bool:
            return "true|false"
        name = "|".join(map(str, self.choices)) or self.value_type.__name__
        return f"{name} ..." if self.is_list else name

    @property
    def shown_default(self) -> str:
        """The default as a user would type it; `none` for an empty value."""
        if self.default is PydanticUndefined:
            return "required"
        if self.is_bool:
            return str(self.default).lower()
        words = map(str, self.default) if isinstance(self.default, list) else [str(self.default)]
        return " ".join(words) or "none"


def is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def flag_table(config_class: type[BaseModel]) -> dict[str, Flag]:
    """Flat name -> Flag. A group class that occurs twice gives its flags the field's name as a prefix."""
    groups = [info.annotation for info in config_class.model_fields.values() if is_group(info.annotation)]
    table: dict[str, Flag] = {}
    for name, info in config_class.model_fields.items():
        if is_group(info.annotation):
            table |= group_flags(name, info, prefixed=groups.count(info.annotation) > 1)
        else:
            table[name] = Flag(name, (name,), "Stage", info, info.get_default(call_default_factory=True))
    return table


def group_flags(name: str, info: FieldInfo, *, prefixed: bool) -> dict[str, Flag]:
    """The flags of one group field, with its name before theirs if `prefixed`."""
    group: Any = info.annotation
    title = (group.__doc__ or name).strip().splitlines()[0]
    flags = {}
    for leaf, leaf_info in group.model_fields.items():
        flat = f"{name}_{leaf}" if prefixed else leaf
        shown = f"{title} ({name})" if prefixed else title
        flags[flat] = Flag(flat, (name, leaf), shown, leaf_info, getattr(info.default, leaf))
    return flags


def flat_items(config: BaseModel) -> Iterator[tuple[str, Any]]:
    """(flag name, value) of a configuration."""
    for flag in flag_table(type(config)).values():
        value: Any = config
        for part in flag.path:
            value = getattr(value, part)
        yield flag.name, value


def nest(values: Mapping[str, Any], table: Mapping[str, Flag]) -> dict[str, Any]:
    """Flat values as the nested mapping that the model validates."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = table[name].path
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[leaf] = convert(value, table[name])
    return nested


def convert(value: Any, flag: Flag) -> Any:
    """What people write for a type: one word for a list, 5e8 for an int, a number for a text. Others unchanged."""
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
