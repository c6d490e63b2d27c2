"""Declare and check settings: one `setting(...)` per field, in the configuration and in the options of every backend."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from distributed.errors import ConfigError, nearest

_LONGEST = 500  # letters of a value in a message


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a setting accepts, its help text and its default."""

    kinds: tuple[type, ...]
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    optional: bool = False
    section: str = ""
    default: Any = None
    convert: Callable[[Any], Any] | None = None  # converts other forms of the value before it is checked


def setting(
    default: Any,
    help: str,  # noqa: A002 - the name of the field in Rule
    *kinds: type,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
    section: str = "",
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a dataclass field with its rule.

    Args:
        default: the default value. None makes the setting optional.
        help: one line for `--help` and the documentation.
        kinds: the accepted types; by default the type of `default`.
        choices: the accepted values, if they are few.
        minimum: the smallest number, inclusive.
        above: a number that the value must exceed.
        maximum: the largest number, inclusive.
        optional: whether None is accepted.
        section: the section of `--help` in which the setting is listed.
        convert: converts other forms of the value before it is checked.
    """
    kinds = kinds or (type(default),)
    optional = optional or default is None
    rule = Rule(kinds, help, choices, minimum, above, maximum, optional, section, default, convert)
    return dataclasses.field(default=default, metadata={"rule": rule})


def rules(cls: type) -> dict[str, Rule]:
    """Return the rule of every declared field of `cls`, by name, in the order of declaration."""
    return {f.name: f.metadata["rule"] for f in dataclasses.fields(cls) if "rule" in f.metadata}


# (name, value) -> the setting as Python, YAML or a flag, for the fix in an error message. None means without a value.
Written = Callable[[str, Any], str]


def in_code(name: str, value: Any) -> str:
    """Return the setting as an argument in Python. The value `...` stands for a dict that the reader has to fill in."""
    if value is None:
        return name
    return f"{name}={value!r}" if isinstance(value, (bool, str, tuple)) else f"{name}={in_words(value)}"


def in_file(name: str, value: Any) -> str:
    """Return the setting as a line of YAML."""
    return name if value is None else f"{name}: {in_words(value)}"


def in_words(value: Any) -> str:
    """Return `value` as it is written in YAML and on the command line."""
    if value is ...:
        return "{...}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed. It is hashable, and is copied, pickled and written as JSON like a dict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise dataclasses.FrozenInstanceError("a checked configuration cannot be changed: make a new one from it")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # hash only the names, because a value may be an unhashable dict

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def lower(value: Any) -> Any:
    """Convert a word to lower case."""
    return value.lower() if isinstance(value, str) else value


def pair(value: Any) -> Any:
    """Convert two numbers in [0, 1), given as such or as "A,B", to a tuple. Return any other value as text, which is then refused."""
    try:
        found = tuple(float(part) for part in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        found = ()
    return found if len(found) == 2 and all(0 <= each < 1 for each in found) else str(value)


def words(value: Any) -> Any:
    """Convert names, given as a list or as "A,B", to one text without spaces and repetitions. Return other values unchanged."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return value
    return ",".join(dict.fromkeys(name.strip() for name in names if name.strip())) or None


def factors(value: Any) -> Any:
    """Convert factors by name, given as a mapping or as "NAME=FACTOR,...". Return any other value as text, which is then refused.

    Raises ConfigError for a factor that is not above 0.
    """
    pairs = dict(part.partition("=")[::2] for part in value.split(",")) if isinstance(value, str) else value
    try:
        found = {str(name): float(factor) for name, factor in pairs.items()}
    except (AttributeError, TypeError, ValueError):
        return str(value)
    for name, factor in found.items():
        if not factor > 0:
            raise ConfigError(f"{name!r} has the factor {factor:g}, which must be above 0: raise it, or drop {name!r}")
    return FrozenDict(found) if found else None


def check(name: str, value: Any, rule: Rule, written: Written = in_code) -> Any:
    """Return `value` converted to the type of the field.

    Args:
        name: the name of the setting, for error messages.
        value: the value to check.
        rule: the rule of the field.
        written: how the error writes the fix: as Python, YAML or a flag.

    Raises:
        ConfigError: the value does not follow the rule. The message has the field, the value, the rule and the fix.
    """
    if rule.convert is not None and value is not None:
        try:
            value = rule.convert(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    if value is None:
        if rule.optional:
            return None
        raise ConfigError(f"{name}=None is not allowed: give {_wanted(rule)} or drop the setting")
    converted = _convert(value, rule)
    if converted is None:
        raise ConfigError(
            f"{name}={_shortened(value)} is not {_wanted(rule)}: give one, such as {written(name, _example(rule))}"
        )
    if rule.choices is not None and converted not in rule.choices:
        words = ", ".join(map(str, rule.choices))
        raise ConfigError(
            f"{name}={_shortened(value)} is not a valid choice{nearest(str(value), map(str, rule.choices))}: choose one of {words}"
        )
    if converted == "":
        raise ConfigError(f"{name}='' is empty: give {_wanted(rule)} or drop the setting")
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(
            f"{name}={_shortened(value)} is not a finite number: give one, such as {written(name, _example(rule))}"
        )
    is_number = isinstance(converted, (int, float)) and not isinstance(converted, bool)
    if is_number and rule.minimum is not None and converted < rule.minimum:
        raise ConfigError(
            f"{name}={_shortened(value)} must be at least {rule.minimum}: give {written(name, rule.minimum)} or more"
        )
    if is_number and rule.maximum is not None and converted > rule.maximum:
        raise ConfigError(
            f"{name}={_shortened(value)} must be at most {rule.maximum}: give {written(name, rule.maximum)} or less"
        )
    if is_number and rule.above is not None and converted <= rule.above:
        raise ConfigError(
            f"{name}={_shortened(value)} must be greater than {rule.above}: give one, such as {written(name, _example(rule))}"
        )
    return converted


def _shortened(value: Any) -> str:
    """Return a value as text for a message, with the middle left out if the text is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def check_options(cls: type, values: Mapping[str, Any], group: str, written: Written = in_code) -> Any:
    """Return an instance of the options class `cls` with the checked `values`.

    Raises ConfigError for unknown names and wrong values. `group` is the name of the option group, for error messages.
    """
    known = rules(cls)
    for name in values:
        if name not in known:
            has = ", ".join(known) or "no options"
            raise ConfigError(f"{group}.{name} is not an option{nearest(name, known)}: {group} has {has}")
    return cls(**{name: check(f"{group}.{name}", value, known[name], written) for name, value in values.items()})


def _convert(value: Any, rule: Rule) -> Any:
    """Return `value` as one of the rule's types, or None if it is none of them."""
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
                return float(value)  # float() of strings too, because YAML 1.1 reads 1e-3 as a string
            except ValueError:
                continue
            except OverflowError:
                return math.inf
        if kind in (str, dict, tuple) and isinstance(value, kind):
            return value
    return None


_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a word", dict: "a mapping",
    tuple: "a pair of numbers in [0, 1)",
}  # fmt: skip


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
    return {int: 1, float: 1.0, bool: True, str: "NAME", dict: ..., tuple: (0.9, 0.95)}[rule.kinds[0]]
