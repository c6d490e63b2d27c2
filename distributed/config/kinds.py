"""The kinds of values that a file of a run may hold, such as counts and texts, and a check that it holds them."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

MAX_LETTERS = 4096  # of a short text, such as a path
MAX_COUNT = 2**53  # of steps, samples or bytes: up to this number JSON is exact everywhere


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of values: what a message calls it, and whether a value belongs to it."""

    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether `value` is a number: NaN, infinity and, as in Python, true and false included."""
    return isinstance(value, (int, float))


def optional(kind: Kind) -> Kind:
    """Return `kind` with null."""
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


def list_of(kind: Kind) -> Kind:
    """Return the kind of lists whose items are all of `kind`."""
    return Kind(
        f"a list of {kind.words}", lambda value: isinstance(value, (list, tuple)) and all(map(kind.holds, value))
    )


def pair_of(kind: Kind) -> Kind:
    """Return the kind of lists of two items that are of `kind`."""
    whole = list_of(kind)
    return Kind(f"a list of two of {kind.words}", lambda value: whole.holds(value) and len(value) == 2)


def object_of(kind: Kind) -> Kind:
    """Return the kind of objects whose values are all of `kind`."""
    return Kind(
        f"an object of {kind.words}",
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(name, str) and kind.holds(inner) for name, inner in value.items())
        ),
    )


COUNT = Kind(f"a whole number from 0 to {MAX_COUNT}", lambda value: type(value) is int and 0 <= value <= MAX_COUNT)
NUMBER = Kind("a number", is_number)
SECONDS = Kind(f"a number from 0 to {MAX_COUNT}", lambda value: is_number(value) and 0 <= value <= MAX_COUNT)
TEXT = Kind("a text", lambda value: isinstance(value, str))
SHORT_TEXT = Kind(
    f"a text of up to {MAX_LETTERS} letters", lambda value: isinstance(value, str) and len(value) <= MAX_LETTERS
)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object with texts as names", object_of(Kind("", lambda value: True)).holds)


def check_kinds(content: Any, kinds: Mapping[str, Kind]) -> None:
    """Raise ValueError if `content` is not an object, or if one of its values is not of the kind in `kinds`.

    The message follows after the name of the file in a sentence. Names that `content` or `kinds` lacks are not checked.
    """
    if not isinstance(content, dict):
        raise ValueError("is not an object")
    for name, kind in kinds.items():
        if name in content and not kind.holds(content[name]):
            raise ValueError(f"has {name}={reprlib.repr(content[name])}, which is not {kind.words}")
