"""Join the outputs of all slices in the order of the samples, for `predict`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy
import tensorflow as tf

Part = tuple[Any, int]  # (arrays of one slice, samples in it)


def joined(parts: Sequence[Sequence[tuple[int, int, Part]]]) -> Any:
    """Return one structure of arrays, joined from the outputs of all ranks.

    Outputs without a row for each sample become a list with an entry for each slice.

    Args:
        parts: for each rank a list of (number of the update, rank, outputs).
    """
    entries = sorted((entry for part in parts for entry in part), key=lambda entry: entry[:2])
    updates = [[entry[2] for entry in update] for _, update in itertools.groupby(entries, key=lambda entry: entry[0])]
    if not updates:
        return []
    pieces = [part for update in updates for part in update]
    flat = [[(tf.nest.flatten(value), n) for value, n in update] for update in updates]
    leaves = [_leaf([[(found[i], n) for found, n in update] for update in flat]) for i in range(len(flat[0][0][0]))]
    return leaves[0] if not tf.nest.is_nested(pieces[0][0]) else tf.nest.pack_sequence_as(pieces[0][0], leaves)


def _leaf(updates: list[list[Part]]) -> Any:
    pieces = [part for update in updates for part in update]
    if any(value.ndim == 0 or len(value) != n for value, n in pieces):
        return [value for value, _ in pieces]
    if len({value.shape[1:] for value, _ in pieces}) > 1:
        return [sample for update in updates for sample in _woven(update)]
    return numpy.stack([sample for update in updates for sample in _woven(update)])


def _woven(update: list[Part]) -> list[Any]:
    """Return the samples of one update in order. Of n ranks, rank r holds every n-th sample from sample r on."""
    out: list[Any] = [None] * sum(n for _, n in update)
    for rank, (value, _) in enumerate(update):
        out[rank :: len(update)] = list(value)
    return out
