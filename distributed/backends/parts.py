"""Arguments of metrics, batch by batch: what is kept of them and how the ranks' parts follow each other. No framework."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Fields(dict[str, Any]):
    """A plain mapping whose entries are attributes too, in the place of a model's own class of outputs."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Arguments(NamedTuple):
    """What a metric is called with for one micro-batch."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Part(NamedTuple):
    """One micro-batch of one rank."""

    key: tuple[int, int]  # where its update begins in the order of the epoch, and its number in the update
    num_samples: int
    value: Any
    replica: int = 0  # of a rank's devices, where the rank is the only one


class Piece(NamedTuple):
    """A `Part` of a known rank."""

    key: tuple[int, int]
    rank: int
    num_samples: int
    value: Any


def arguments(value: Any) -> Arguments:
    """What a `training_step` returned for a metric: a tuple or list of arguments, a dict of named ones, or one argument."""
    if isinstance(value, Arguments):
        return value
    if isinstance(value, (tuple, list)):
        return Arguments(tuple(value), {})
    return Arguments((), dict(value)) if isinstance(value, Mapping) else Arguments((value,), {})


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of everything in the containers of `value`; mappings and data classes become `Fields`."""
    if isinstance(value, Arguments):
        return Arguments(mapped(value.args, function), mapped(value.named, function))
    if isinstance(value, (tuple, list)):
        items = [mapped(each, function) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if type(value) is not Fields:  # what Hugging Face's models keep for generating more is no output
            value = {key: each for key, each in value.items() if key != "past_key_values"}
        return Fields({key: mapped(each, function) for key, each in value.items()})
    return function(value)


def cut(value: Any, begin: int, end: int, num_samples: int) -> Any:
    """Samples `begin` to `end` of `num_samples`. What has no rows for them stays whole."""

    def rows(leaf: Any) -> Any:
        length = _length(leaf)
        if length == 0 or length % num_samples:
            return leaf
        each = length // num_samples
        return leaf[begin * each : end * each]

    if isinstance(value, list) and len(value) == num_samples:  # an entry for each sample: texts, boxes
        return value[begin:end]
    if isinstance(value, (tuple, list)):
        return type(value)([cut(each, begin, end, num_samples) for each in value])
    if isinstance(value, Mapping):
        return Fields({key: cut(each, begin, end, num_samples) for key, each in value.items()})
    return rows(value)


def has_rows(value: Any, num_samples: int) -> bool:
    """Whether something in `value` has rows for each of `num_samples`."""
    if isinstance(value, list) and len(value) == num_samples:
        return True
    if isinstance(value, (tuple, list, Mapping)):
        return any(has_rows(each, num_samples) for each in (value.values() if isinstance(value, Mapping) else value))
    return _length(value) > 0 and _length(value) % num_samples == 0


def _length(leaf: Any) -> int:
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else 0


def num_bytes(value: Any) -> int:
    """What the tensors inside `value` take."""
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(num_bytes, value))
    return int(getattr(value, "nbytes", 0))


def by_update(pieces: Sequence[Piece], is_presharded: bool) -> list[list[tuple[Any, int]]]:
    """(value, samples) in the order of the samples: of one micro-batch rank r holds every world-th sample from r on.

    `is_presharded`: the samples of one rank come after those of another, as each brought its own.
    """
    if is_presharded:
        return [[(p.value, p.num_samples)] for p in sorted(pieces, key=lambda p: (p.rank, p.key))]
    ordered = sorted(pieces, key=lambda piece: (piece.key, piece.rank))
    return [[(p.value, p.num_samples) for p in group] for _, group in itertools.groupby(ordered, key=lambda p: p.key)]
