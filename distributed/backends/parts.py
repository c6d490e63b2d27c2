"""Keep and cut the arguments of metrics, and put them into the order of the samples. Loads no framework."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Fields(dict[str, Any]):
    """Hold the fields of a model's outputs, as entries and as attributes.

    It replaces the model's own class of outputs, which may not exist in the process that reads the outputs.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Arguments(NamedTuple):
    """Hold the arguments of a metric for one micro-batch."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Part(NamedTuple):
    """Hold the value that a metric keeps of one micro-batch of one rank."""

    key: tuple[int, int]  # (position of its update in the epoch, number of the micro-batch in the update)
    num_samples: int
    value: Any
    replica: int = 0  # number of the device, if a process trains on several


# Name of an additional argument in `Arguments` of several joined micro-batches. Its value is a list of
# [position, number, samples].
JOINED = "joined micro-batches"
Batch = tuple[tuple[int, int], int, Any]  # (key, samples, arguments) of a micro-batch


class RankedPart(NamedTuple):
    """Hold a `Part` together with its rank."""

    key: tuple[int, int]
    rank: int
    num_samples: int
    value: Any


def arguments(value: Any) -> Arguments:
    """Return the arguments that a `training_step` returned for a metric.

    `value` is a tuple or list of arguments, a dict of named ones, or a single argument.
    """
    if isinstance(value, Arguments):
        return value
    if isinstance(value, (tuple, list)):
        return Arguments(tuple(value), {})
    return Arguments((), dict(value)) if isinstance(value, Mapping) else Arguments((value,), {})


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to each leaf in its containers. Mappings and data classes become `Fields`."""
    if isinstance(value, Arguments):
        return Arguments(mapped(value.args, function), mapped(value.named, function))
    if isinstance(value, (tuple, list)):
        items = [mapped(each, function) for each in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if type(value) is not Fields:  # past_key_values is Hugging Face's cache for generation, not an output
            value = {key: each for key, each in value.items() if key != "past_key_values"}
        return Fields({key: mapped(each, function) for key, each in value.items()})
    return function(value)


def cut(value: Any, begin: int, end: int, num_samples: int) -> Any:
    """Return the samples from `begin` to `end` of a `value` for `num_samples`. A leaf without rows for each sample
    stays whole."""

    def rows(leaf: Any) -> Any:
        length = _length(leaf)
        if length == 0 or length % num_samples:
            return leaf
        each = length // num_samples
        return leaf[begin * each : end * each]

    if isinstance(value, list) and len(value) == num_samples:  # one entry per sample, such as texts or boxes
        return value[begin:end]
    if isinstance(value, (tuple, list)):
        return type(value)([cut(each, begin, end, num_samples) for each in value])
    if isinstance(value, Mapping):
        return Fields({key: cut(each, begin, end, num_samples) for key, each in value.items()})
    return rows(value)


def micro_batches(key: tuple[int, int], num_samples: int, value: Any) -> list[Batch]:
    """Return the micro-batches in `value`: `value` itself, or the parts of joined micro-batches (see `JOINED`)."""
    if not isinstance(value, Arguments) or JOINED not in value.named:
        return [(key, num_samples, value)]
    found: list[Batch] = []
    begin = 0
    for position, number, size in value.named[JOINED]:
        args = tuple(cut(arg, begin, begin + size, num_samples) for arg in value.args)
        found.append(((int(position), int(number)), int(size), Arguments(args, Fields())))
        begin += int(size)
    return found


def has_rows(value: Any, num_samples: int) -> bool:
    """Return whether a leaf of `value` has the same number of rows for each of `num_samples` samples."""
    if isinstance(value, list) and len(value) == num_samples:
        return True
    if isinstance(value, (tuple, list, Mapping)):
        return any(has_rows(each, num_samples) for each in (value.values() if isinstance(value, Mapping) else value))
    return _length(value) > 0 and _length(value) % num_samples == 0


def _length(leaf: Any) -> int:
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else 0


def num_bytes(value: Any) -> int:
    """Return the size in bytes of the tensors inside `value`."""
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, (tuple, list)):
        return sum(map(num_bytes, value))
    return int(getattr(value, "nbytes", 0))


def by_update(pieces: Sequence[RankedPart], is_presharded: bool) -> list[list[tuple[Any, int]]]:
    """Return the (value, samples) of `pieces` in the order of the samples, one list per micro-batch of the whole world.

    In such a list, rank r of n ranks holds every n-th sample, beginning with sample r. With `is_presharded`, each rank
    has its own data. Each piece is then a list of its own, ordered by rank.
    """
    if is_presharded:
        return [[(p.value, p.num_samples)] for p in sorted(pieces, key=lambda p: (p.rank, p.key))]
    ordered = sorted(pieces, key=lambda piece: (piece.key, piece.rank))
    return [[(p.value, p.num_samples) for p in same] for _, same in itertools.groupby(ordered, key=lambda p: p.key)]
