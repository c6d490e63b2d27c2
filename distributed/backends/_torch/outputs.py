"""Join the outputs of all slices in the order of the samples, for `predict`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch

from distributed.backends._torch.nested import children, rebuilt


class Outputs(NamedTuple):
    """Hold the model's outputs for one slice of an update."""

    value: Any
    num_samples: int


Update = list[Outputs]  # of one update, by rank: of n ranks, rank r has every n-th sample from sample r on


def by_update(parts: Sequence[Sequence[tuple[int, int, Outputs]]]) -> list[Update]:
    """Return the outputs per update, sorted by update and rank.

    `parts` hold (update number, rank, outputs) of every rank.
    """
    entries = sorted((entry for part in parts for entry in part), key=lambda entry: entry[:2])
    return [[entry[2] for entry in update] for _, update in itertools.groupby(entries, key=lambda entry: entry[0])]


def by_rank(parts: Sequence[Sequence[tuple[int, int, Outputs]]]) -> list[Update]:
    """Return the outputs rank by rank, for ranks that bring their own samples."""
    return [[outputs] for part in parts for _, _, outputs in part]


def joined(updates: Sequence[Update]) -> Any:
    """Return one object that has the structure of a single output and holds all samples.

    Tensors and arrays are joined along their first dimension, and lists with one entry per sample are concatenated,
    also inside tuples, mappings and data classes. Tensors that differ in their other dimensions are returned as a
    list with one entry per sample. Values that belong to no sample (a loss, a cache) are returned as a list with one
    entry per slice.
    """
    pieces = [piece for update in updates for piece in update]
    if not pieces:
        return []
    first = pieces[0].value
    if all(isinstance(piece.value, torch.Tensor) for piece in pieces):
        return _joined_tensors(updates, pieces)
    if all(isinstance(value, (list, numpy.ndarray)) and _length(value) == n for value, n in pieces):
        samples = [sample for update in updates for sample in _woven(update)]
        return samples if isinstance(first, list) else numpy.stack(samples)
    held = children(first)
    if held is not None and all(_is_alike(first, held, piece.value) for piece in pieces):
        return rebuilt(first, {key: joined(_inside(updates, key)) for key in held})
    return None if all(piece.value is None for piece in pieces) else [piece.value for piece in pieces]


def _joined_tensors(updates: Sequence[Update], pieces: Sequence[Outputs]) -> Any:
    if any(_length(value) == 0 or _length(value) % n for value, n in pieces):
        return [piece.value for piece in pieces]
    if len({(_length(value) // n, value.shape[1:]) for value, n in pieces}) == 1:
        return torch.cat([_woven_tensors(update) for update in updates])
    split = [[Outputs(v if len(v) == n else v.chunk(n), n) for v, n in update] for update in updates]
    return [sample for update in split for sample in _woven(update)]


def _woven_tensors(update: Update) -> torch.Tensor:
    """Return the samples of one update in order. A sample may have several rows."""
    first: torch.Tensor = update[0].value
    if len(update) == 1:
        return first
    rows = first.shape[0] // update[0].num_samples
    out = first.new_empty((sum(n for _, n in update), rows, *first.shape[1:]))
    for rank, (value, n) in enumerate(update):
        out[rank :: len(update)] = value.reshape(n, rows, *first.shape[1:])
    return out.flatten(0, 1)


def _woven(update: Update) -> list[Any]:
    """Return the samples of one update in order. Each sample is an entry of a sequence."""
    out: list[Any] = [None] * sum(n for _, n in update)
    for rank, (value, _) in enumerate(update):
        out[rank :: len(update)] = list(value)
    return out


def _length(value: Any) -> int:
    return 0 if getattr(value, "shape", None) == () else len(value)


def _is_alike(first: Any, held: dict[Any, Any], value: Any) -> bool:
    return type(value) is type(first) and (children(value) or {}).keys() == held.keys()


def _inside(updates: Sequence[Update], key: Any) -> list[Update]:
    return [[Outputs((children(value) or {})[key], n) for value, n in update] for update in updates]
