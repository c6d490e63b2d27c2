"""Read JSON and YAML of files that somebody else may have written, within limits; what their content means does not belong here."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from distributed.errors import ConfigError

MAX_DEPTH = 100  # of lists and objects inside each other
MAX_DIGITS = 300  # of a whole number, so that it is a finite float too
MAX_JSON_BYTES = 16 << 20
MAX_RECORD_BYTES = 1 << 20  # of a JSON file that describes one run, such as result.json
MAX_CONTAINERS = 300_000  # lists and objects in one JSON text, each of which takes some hundred bytes of memory
MAX_VALUES = 1_350_000  # values and names in one JSON text. A text of two letters takes 90 bytes of memory
# Of a JSON text that is not ASCII alone, because each of its letters takes up to 4 bytes of memory.
MAX_WIDE_BYTES = 8 << 20
MAX_MANIFEST_BYTES = 8 << 20
# Of a safetensors file. The format allows 100 MB, which takes a gigabyte as Python objects. These limits are enough for about
# 130,000 tensors, which take 170 MB. A tensor has three lists and objects, and a piece of one has two more.
MAX_HEADER_BYTES, MAX_HEADER_CONTAINERS = 16_000_000, 500_000
MAX_HEADER_TEXTS = 1_000_000  # names included. A tensor has five, and a piece of one has two more
MAX_YAML_BYTES = 256 << 10  # also after each alias is replaced by what it stands for
MAX_YAML_VALUES = 50_000  # values and names, lists and mappings included

# What the constructors of yaml raise for a value that does not fit its tag, such as the date 2026-99-99
_YAML_VALUE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


class LimitError(ValueError):
    """A file is beyond a limit. The message says what is wrong and follows after the name of the file in a sentence."""


def open_regular(path: Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading. `flags` are further flags of `os.open`.

    Raises OSError if it cannot be opened, LimitError if it is another kind of file, such as a pipe, whose reader would wait.
    """
    file = open(path, "rb", opener=lambda name, more: os.open(name, flags | more | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise LimitError("is not a regular file")
    return file


def read_bytes(path: Path, most: int, flags: int = 0) -> bytes:
    """Return the content of a file as `open_regular` opens it. Raises its errors, and LimitError if there are more than `most` bytes."""
    with open_regular(path, flags) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise LimitError(f"has {size} bytes, {most} are allowed")
        return file.read(most)


def parse_json(raw: bytes | str) -> Any:
    """Return the value of a JSON text. NaN and infinity are accepted as Python's `json` writes them.

    Raises ValueError if it is not JSON; of this kind LimitError if it is beyond a limit.
    """
    count = num_containers(raw)
    if count > MAX_CONTAINERS:
        raise LimitError(f"has {count} lists and objects, {MAX_CONTAINERS} are allowed")
    if (values := count + num_separators(raw)) > MAX_VALUES:
        raise LimitError(f"has {values} values and names, {MAX_VALUES} are allowed")
    if len(raw) > MAX_WIDE_BYTES and not raw.isascii():
        raise LimitError(f"has {len(raw)} bytes that are not ASCII alone, {MAX_WIDE_BYTES} are allowed")
    return parsed(raw)


def parsed(raw: bytes | str, errors: str = "strict") -> Any:
    """Return the value of a JSON text of any size, as `parse_json` does. `errors` is that of `bytes.decode`.

    A number that is too large is accepted if another value of the same name follows in its object.
    """
    text = raw if isinstance(raw, str) else raw.decode(errors=errors)
    has_limit = 0 < sys.get_int_max_str_digits() <= sys.int_info.default_max_str_digits
    try:
        content = (_DECODER if has_limit else _SLOW_DECODER).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python reads no number of so many digits
        known = _DIGITS.search(str(error))
        raise _too_many_digits(known[1] if known else f"more than {MAX_DIGITS}") from None
    # With `_ZEROS`, these are what all numbers have that are too large, and few others.
    data = (raw.encode(errors="replace") if isinstance(raw, str) else raw).translate(_ZEROS)
    has_digits = b"0" * _FEWER_DIGITS in data
    if has_digits or any(exponent in data for exponent in _LARGE_EXPONENTS):
        _check_numbers(content, text, has_digits)
    if num_containers(raw) > MAX_DEPTH:
        _check_depth(content)
    return content


def num_containers(raw: bytes | str) -> int:
    """Return the number of lists and objects in a JSON text, or a larger one if its strings have brackets."""
    return raw.count("[") + raw.count("{") if isinstance(raw, str) else raw.count(b"[") + raw.count(b"{")


def has_containers(values: Collection[Any]) -> bool:
    """Return whether one of the values of a list or object is a list or object itself."""
    kinds = set(map(type, values))
    return dict in kinds or list in kinds


def num_separators(raw: bytes | str) -> int:
    """Return the number of commas and colons in a JSON text, those in its strings included."""
    return raw.count(",") + raw.count(":") if isinstance(raw, str) else raw.count(b",") + raw.count(b":")


def _check_numbers(content: Any, text: str, has_digits: bool) -> None:
    """Raise LimitError if a number in `content`, which is the value of the JSON text `text`, is too large.

    `has_digits` tells whether a whole number may be too large.
    """
    for values in _levels(content):
        kinds = set(map(type, values))
        if has_digits and int in kinds:
            for each in values:
                if type(each) is int and not -_TOO_LARGE < each < _TOO_LARGE:
                    raise _too_many_digits(str(len(str(abs(each)))))
        for constant in _INFINITIES if float in kinds else ():
            if constant in values and any(each is not constant for each in values if each == constant):
                found = (each[0] for each in itertools.islice(_MAY_BE_LARGE.finditer(text), 1000))
                large = next((each for each in found if math.isinf(float(each))), "")
                raise LimitError(
                    f"has the number {large[:20]}, which is too large" if large else "has a number that is too large"
                )


def _too_many_digits(digits: str) -> LimitError:
    return LimitError(f"has a number of {digits} digits, {MAX_DIGITS} are allowed")


_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LARGE_EXPONENTS = (b"e000", b"e+000", b"E000", b"E+000")
_FEWER_DIGITS = 200  # With an exponent of two digits, such a number is still a float.
_TOO_LARGE = 10**MAX_DIGITS
_DIGITS = re.compile(r"value has (\d+) digits")  # the message of `int`
# A number that may be too large for a float, perhaps within a string. Each part is matched in one way only, so that the time is linear.
_MAY_BE_LARGE = re.compile(
    r"(?<![^\s,:\[])-?(?:[0-9]++(?:\.[0-9]++)?+[eE]\+?[0-9]{3,}+"
    rf"|[0-9]{{{_FEWER_DIGITS},}}+(?:\.[0-9]++)?+(?:[eE]\+?[0-9]++)?+)(?![^\s,\]}}])"
)
# The values of Infinity and -Infinity in a JSON text are these objects. An equal object is a number that is too large.
_INFINITIES = (math.inf, -math.inf)
_CONSTANTS = {"Infinity": _INFINITIES[0], "-Infinity": _INFINITIES[1], "NaN": math.nan}
_DECODER = json.JSONDecoder(parse_constant=_CONSTANTS.__getitem__)


def _int(text: str) -> int:
    """Convert a whole number as `int` does by default. The user may have switched off its limit of digits (PYTHONINTMAXSTRDIGITS)."""
    if len(text) > sys.int_info.default_max_str_digits:
        raise ValueError(f"value has {len(text.removeprefix('-'))} digits")
    return int(text)


_SLOW_DECODER = json.JSONDecoder(parse_constant=_CONSTANTS.__getitem__, parse_int=_int)


def _levels(content: Any) -> Iterator[list[Any]]:
    """Yield `[content]`, then the values of its lists and objects, level by level."""
    level: list[Any] = [[content]]
    while level:
        values = [each for inside in level for each in (inside.values() if type(inside) is dict else inside)]
        yield values
        level = [each for each in values if type(each) is dict or type(each) is list] if has_containers(values) else []


def _check_depth(content: Any) -> None:
    if any(depth > MAX_DEPTH for depth, _ in enumerate(_levels(content))):
        raise _too_deep()


def _too_deep() -> LimitError:
    return LimitError(f"has lists or objects more than {MAX_DEPTH} deep inside each other")


# ------------------------------------------------------------------ YAML


def read_unique(path: str | os.PathLike[str], where: str, wanted: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of each top-level name and of each name in an option group (as `group.name`).

    A name that occurs twice is an error. YAML itself would keep the last one.

    Args:
        path: the file, which may be a pipe.
        where: the name of the file in messages.
        wanted: what to write instead of a text that is not YAML.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is beyond a limit, or has a name twice. The message has the line.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        loader, node = _composed(raw)
        lines = _lines(node, where)
        return None if node is None else loader.construct_document(node), lines
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}): name another") from None
    except LimitError as error:
        raise ConfigError(f"{where} {error}: write {wanted}") from None
    except (yaml.YAMLError, *_YAML_VALUE_ERRORS) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "no text"
        raise ConfigError(f"{where}{line} is not YAML ({problem}): write {wanted}") from None


def parse_yaml(raw: bytes) -> Any:
    """Return the value of a YAML text. Raises ValueError if it is not YAML, of this kind LimitError if it is beyond a limit."""
    import yaml

    try:
        loader, node = _composed(raw)
        return None if node is None else loader.construct_document(node)
    except LimitError:
        raise
    except (yaml.YAMLError, *_YAML_VALUE_ERRORS):
        raise ValueError("is not YAML") from None


def _composed(raw: bytes) -> tuple[Any, Any]:
    """Return a loader and the node of the document in `raw`, which is None if there is none. Raises LimitError."""
    import yaml

    if len(raw) > MAX_YAML_BYTES:
        raise LimitError(f"has more than {MAX_YAML_BYTES} bytes")
    _check_events(yaml.parse(raw, _loader()))
    loader = _loader()(raw)
    return loader, loader.get_single_node()


def _check_events(events: Iterable[Any]) -> None:
    """Raise LimitError if the nodes are too deep inside each other, or too large after all aliases are replaced."""
    import yaml

    total, count, sizes = 0, 0, dict[str, int]()  # sizes: anchor -> the size of what it stands for
    begun: list[tuple[str | None, int]] = []
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise LimitError(f"uses the alias *{event.anchor}, but no anchor &{event.anchor} ends before it")
            total += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            total += 1 + len(event.value)
            sizes |= {event.anchor: 1 + len(event.value)} if event.anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes |= {anchor: total - before} if anchor else {}
        if len(begun) > MAX_DEPTH:
            raise _too_deep()
        count += isinstance(event, yaml.NodeEvent)
        if count > MAX_YAML_VALUES:
            raise LimitError(f"has more than {MAX_YAML_VALUES} values and names")
        if total > MAX_YAML_BYTES + 1:
            raise LimitError(f"has more than {MAX_YAML_BYTES} bytes after its aliases are replaced")


@functools.cache
def _loader() -> Any:
    """Return yaml's SafeLoader without the numbers to the base of 60 of YAML 1.1, which read `num_nodes: 1:4` as 64."""
    import yaml

    loader: Any = type(
        "Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {}
    )  # the C loader is ten times as fast

    def number(loader: Any, node: Any) -> Any:
        if ":" in node.value:
            return node.value
        if not node.tag.endswith(":int"):
            value = loader.construct_yaml_float(node)
            if math.isinf(value) and "inf" not in node.value.lower():
                raise LimitError(f"has the number {node.value[:20]}, which is too large")
            return value
        if abs(value := loader.construct_yaml_int(node)) >= 10**MAX_DIGITS:
            raise LimitError(f"has a number of more than {MAX_DIGITS} digits")
        return value

    for tag in ("int", "float"):
        loader.add_constructor(f"tag:yaml.org,2002:{tag}", number)
    return loader


def _lines(node: Any, where: str, prefix: str = "") -> dict[str, int]:
    """Return the line of each name in the mapping `node`. Raises ConfigError if a name occurs twice."""
    lines: dict[str, int] = {}
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        if key.id != "scalar":
            continue
        name, line = prefix + key.value, key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{where} has {key.value!r} in line {lines[name]} and again in line {line}: drop one")
        lines[name] = line
        if not prefix:
            lines.update(_lines(value, where, f"{name}."))
    return lines
