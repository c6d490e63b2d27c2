"""Search spaces: names and their possible values. In YAML a value is written `{loguniform: [1e-4, 1e-1]}`; in code
it may also be a domain of Ray Tune."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.config.reading import read_unique
from distributed.errors import ConfigError, nearest

_EXAMPLE = "learning_rate: {loguniform: [1e-4, 1e-1]}"


@dataclasses.dataclass(frozen=True)
class Dimension:
    """Possible values of one name.

    `kind` is "uniform", "loguniform", "randint" (the upper end excluded), "choice", "constant", or "sampler" for a
    domain that only its own library can draw from.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    values: tuple[Any, ...] = ()
    sampler: Callable[[Any], Any] | None = None  # for kind "sampler": numpy RandomState -> value

    @property
    def is_varied(self) -> bool:
        """Return whether there is more than one value."""
        return self.kind != "constant"

    def at(self, unit: float) -> Any:
        """Return the value at position `unit`, from 0 to 1, of the dimension."""
        if self.kind == "uniform":
            return self.low + unit * (self.high - self.low)
        if self.kind == "loguniform":
            return math.exp(math.log(self.low) + unit * (math.log(self.high) - math.log(self.low)))
        if self.kind == "randint":
            return min(int(self.low + unit * (self.high - self.low)), int(self.high) - 1)
        return self.values[min(int(unit * len(self.values)), len(self.values) - 1)]

    def unit(self, value: Any) -> float:
        """Return a position of `value` in the dimension, for which `at` returns `value` again."""
        if self.kind == "uniform":
            return float((value - self.low) / (self.high - self.low))
        if self.kind == "loguniform":
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        if self.kind == "randint":
            return float((value - self.low + 0.5) / (self.high - self.low))
        return (self.values.index(value) + 0.5) / len(self.values)

    def inside(self, value: Any) -> Any:
        """Return `value`, or the nearest value within the dimension."""
        if self.kind in ("uniform", "loguniform"):
            return min(max(value, self.low), self.high)
        return min(max(int(value), int(self.low)), int(self.high) - 1) if self.kind == "randint" else value

    def recalled(self, written: Any) -> Any:
        """Return the choice that a journal contains as `written`."""
        return next((each for each in self.values if _text(each) == _text(written)), written)

    def grid(self) -> tuple[Any, ...] | None:
        """Return all values, or None if they cannot be counted."""
        if self.kind == "randint":
            return tuple(range(int(self.low), int(self.high)))
        return self.values or None


Space = Mapping[str, Dimension]


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


def read_space(path: str | os.PathLike[str]) -> dict[str, Dimension]:
    """Return the space in a YAML file. Raises ConfigError with the file and the name."""
    where = f"search space {str(path)!r}"
    content, _ = read_unique(path, where, f"lines such as '{_EXAMPLE}'")
    return make_space(content, where)


def make_space(content: Any, where: str = "search_space") -> dict[str, Dimension]:
    """Return the space that `content` describes. Raises ConfigError if `content` is not a space, or has only
    constants."""
    if not isinstance(content, Mapping) or not content:
        what = "is empty" if not content else f"is a {type(content).__name__}"
        raise ConfigError(f"{where} {what}: give each name its values, as {_EXAMPLE}")
    for name in content:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: the name {name!r} is a {type(name).__name__}: write it in quotes")
    space = {name: _dimension(f"{where}: {name}", value) for name, value in content.items()}
    if not any(each.is_varied for each in space.values()):
        raise ConfigError(f"{where} has constants only: give a name several values, as {_EXAMPLE}")
    return space


def _dimension(where: str, value: Any) -> Dimension:
    if isinstance(value, Mapping):
        return _written(where, value)
    if isinstance(value, (list, tuple)):
        return _choice(where, value)
    if callable(sample := getattr(value, "sample", None)):
        return _of_library(where, value, sample)
    if isinstance(value, (bool, int, float, str, type(None))):
        return Dimension("constant", values=(_number(value),))
    raise ConfigError(f"{where} is a {type(value).__name__}: write a list, a constant, or {{uniform: [0, 1]}}")


def _written(where: str, value: Mapping[str, Any]) -> Dimension:
    """Return the dimension for a mapping from one kind to its arguments, such as `{uniform: [0, 1]}`."""
    if len(value) != 1:
        raise ConfigError(f"{where} has {len(value)} kinds: write one of {', '.join(_KINDS)}, as {{uniform: [0, 1]}}")
    ((kind, arguments),) = value.items()
    if kind not in _KINDS:
        raise ConfigError(f"{where}: {kind!r} is not a kind{nearest(kind, _KINDS)}: write one of {', '.join(_KINDS)}")
    return _KINDS[kind](where, arguments)


def _choice(where: str, values: Any) -> Dimension:
    if not isinstance(values, (list, tuple)) or not values:
        raise ConfigError(f"{where}={values!r} has no values: write a list of at least one, as [32, 64]")
    return Dimension("choice", values=tuple(_number(value) for value in values))


def _range(kind: str) -> Callable[[str, Any], Dimension]:
    def make(where: str, arguments: Any) -> Dimension:
        ends = _ends(where, kind, arguments)
        if kind == "loguniform" and ends[0] <= 0:
            raise ConfigError(f"{where}: {kind} from {ends[0]:g} has no logarithm: begin above 0, or write uniform")
        if kind == "randint" and any(end != int(end) for end in ends):
            raise ConfigError(f"{where}: {kind} from {ends[0]:g} to {ends[1]:g} needs whole numbers: write uniform")
        return Dimension(kind, *ends)

    return make


def _ends(where: str, kind: str, arguments: Any) -> tuple[float, float]:
    ends = [_number(each) for each in arguments] if isinstance(arguments, (list, tuple)) else []
    is_pair = len(ends) == 2 and all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends)
    if not is_pair or not all(abs(end) <= sys.float_info.max for end in ends):
        raise ConfigError(f"{where}: {kind} takes two numbers, not {arguments!r}: write {kind}: [1, 10]")
    if ends[0] >= ends[1]:
        raise ConfigError(f"{where}: {kind} from {ends[0]:g} to {ends[1]:g} is empty: write the smaller one first")
    return ends[0], ends[1]


_KINDS: Mapping[str, Callable[[str, Any], Dimension]] = {
    **{kind: _range(kind) for kind in ("uniform", "loguniform", "randint")},
    "choice": _choice,
    "grid_search": _choice,
}


def _number(value: Any) -> Any:
    """Return text such as `1e-4` as a number. YAML 1.1 reads it as text."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _of_library(where: str, domain: Any, sample: Callable[..., Any]) -> Dimension:
    """Return the dimension for a domain of Ray Tune. If its kind is unknown, Ray Tune draws each value."""
    categories = getattr(domain, "categories", None)
    if categories is not None:
        return _choice(where, list(categories))
    sampler = domain.get_sampler() if hasattr(domain, "get_sampler") else None
    kinds = {
        ("Float", "_Uniform"): "uniform",
        ("Float", "_LogUniform"): "loguniform",
        ("Integer", "_Uniform"): "randint",
    }
    kind = kinds.get((type(domain).__name__, type(sampler).__name__))
    if kind is not None:
        return _range(kind)(where, (domain.lower, domain.upper))
    return Dimension("sampler", sampler=lambda state: sample(random_state=state))


def draw(space: Space, state: Any) -> dict[str, Any]:
    """Return one value for each name, drawn from a numpy RandomState."""
    return {
        name: each.values[0] if not each.is_varied else each.sampler(state) if each.sampler else each.at(state.random())
        for name, each in space.items()
    }


def constants(space: Space) -> dict[str, Any]:
    """Return the values that all trials share."""
    return {name: each.values[0] for name, each in space.items() if not each.is_varied}


def varied(space: Space) -> dict[str, Dimension]:
    """Return the dimensions that have more than one value."""
    return {name: each for name, each in space.items() if each.is_varied}


def size_of_grid(space: Space) -> int | None:
    """Return the number of combinations, or None if they cannot be counted."""
    grids: Sequence[tuple[Any, ...] | None] = [each.grid() for each in space.values()]
    return None if None in grids else math.prod(len(grid or ()) for grid in grids)
