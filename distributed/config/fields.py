"""Declares and checks settings: one `setting(...)` line per field, used by the config and by every backend's options."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from distributed.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value may be, and what it means."""

    kinds: tuple[type, ...]
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    optional: bool = False
    group: str = ""
    default: Any = None
    convert: Callable[[Any], Any] | None = None  # from other forms of the value, before anything else looks at it


def setting(
    default: Any,
    help: str,  # noqa: A002 - the field's own word
    *kinds: type,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
    group: str = "",
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """A dataclass field with its rule. `optional` admits None; `minimum` and `maximum` are inclusive, `above` exclusive."""
    kinds = kinds or (type(default),)
    optional = optional or default is None
    rule = Rule(kinds, help, choices, minimum, above, maximum, optional, group, default, convert)
    return dataclasses.field(default=default, metadata={"rule": rule})


def rules(cls: type) -> dict[str, Rule]:
    """The rule of every declared field of `cls`, in order."""
    return {f.name: f.metadata["rule"] for f in dataclasses.fields(cls) if "rule" in f.metadata}


# How the setting NAME is written where its value came from, with a value or without (None): for the fix in an error.
Written = Callable[[str, Any], str]


def in_code(name: str, value: Any) -> str:
    """As an argument in Python. A value of `...` is left to the reader."""
    if value is None:
        return name
    return f"{name}={value!r}" if isinstance(value, (bool, str)) else f"{name}={in_words(value)}"


def in_file(name: str, value: Any) -> str:
    """As a line of YAML."""
    return name if value is None else f"{name}: {in_words(value)}"


def in_words(value: Any) -> str:
    """`value` as YAML and the command line have it."""
    if value is ...:
        return "{...}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class FrozenDict(dict[str, Any]):
    """A dict that nobody can change: it may be a key, and is copied, pickled and written as JSON like any other."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise dataclasses.FrozenInstanceError("a checked configuration cannot be changed: make another from it")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # a value may be a dict

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def check(name: str, value: Any, rule: Rule, written: Written = in_code) -> Any:
    """`value` in the field's own type, or ConfigError naming field, value, rule and fix.

    `written` is how the fix is written: as Python, as YAML or as a flag.
    """
    if rule.convert is not None and value is not None:
        value = rule.convert(value)
    if value is None:
        if rule.optional:
            return None
        raise ConfigError(f"{name}=None is not allowed: give {_wanted(rule)} or drop the setting")
    converted = _convert(value, rule)
    if converted is None:
        raise ConfigError(f"{name}={value!r} is not {_wanted(rule)}: give one, such as {written(name, _example(rule))}")
    if rule.choices is not None and converted not in rule.choices:
        words = ", ".join(map(str, rule.choices))
        raise ConfigError(
            f"{name}={value!r} is not a choice{nearest(str(value), map(str, rule.choices))}: choose one of {words}"
        )
    if converted == "":
        raise ConfigError(f"{name}='' is empty: give {_wanted(rule)} or drop the setting")
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{name}={value!r} is not a finite number: give one, such as {written(name, _example(rule))}")
    is_number = isinstance(converted, (int, float)) and not isinstance(converted, bool)
    if is_number and rule.minimum is not None and converted < rule.minimum:
        raise ConfigError(
            f"{name}={value!r} must be at least {rule.minimum}: give {written(name, rule.minimum)} or more"
        )
    if is_number and rule.maximum is not None and converted > rule.maximum:
        raise ConfigError(
            f"{name}={value!r} must be at most {rule.maximum}: give {written(name, rule.maximum)} or less"
        )
    if is_number and rule.above is not None and converted <= rule.above:
        raise ConfigError(
            f"{name}={value!r} must be greater than {rule.above}: give one, such as {written(name, _example(rule))}"
        )
    return converted


def check_options(cls: type, values: Mapping[str, Any], group: str, written: Written = in_code) -> Any:
    """An instance of the options class `cls` from a mapping; ConfigError for unknown names and wrong values."""
    known = rules(cls)
    for name in values:
        if name not in known:
            has = ", ".join(known) or "no options"
            raise ConfigError(f"{group}.{name} is not an option{nearest(name, known)}: {group} has {has}")
    return cls(**{name: check(f"{group}.{name}", value, known[name], written) for name, value in values.items()})


def _convert(value: Any, rule: Rule) -> Any:
    """`value` as one of the rule's kinds, or None where it is none of them."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    for kind in rule.kinds:
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if kind is float and isinstance(value, (numbers.Real, str)) and not isinstance(value, bool):
            try:
                return float(value)  # also of a word: YAML 1.1 reads 1e-3 as one
            except ValueError:
                continue
            except OverflowError:
                return math.inf
        if kind in (str, dict) and isinstance(value, kind):
            return value
    return None


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", dict: "a mapping"}


def _wanted(rule: Rule) -> str:
    if rule.choices is not None:
        return f"one of {', '.join(map(str, rule.choices))}"
    return " or ".join(_WORDS[kind] for kind in rule.kinds)


def _example(rule: Rule) -> Any:
    if rule.choices is not None:
        return rule.choices[0]
    if rule.default not in (None, "") and not isinstance(rule.default, bool):
        return rule.default
    if rule.minimum is not None or rule.above is not None:
        return max(1, int(rule.minimum or 0))
    return {int: 1, float: 1.0, bool: True, str: "NAME", dict: ...}[rule.kinds[0]]
