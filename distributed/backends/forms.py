"""Recognise arguments that were passed as data but are not a data set. Loads no framework."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

_TABLES = ("pandas", "polars")


def fault_of(data: Any, pair: str) -> str | None:
    """Return why `data` is not a data set and what to pass instead, or None if its form is right.

    `pair` is the text that suggests what to pass for a pair of inputs and targets.
    """
    kind = type(data).__name__
    if data is None:
        return f"None is not a data set: give {pair}, or a DataLoader"
    if isinstance(data, type):
        return f"{data.__name__} is a class: make an object of it"
    if isinstance(data, types.FunctionType | types.MethodType):
        return f"{data.__name__} is a function: call it, or give an IterableDataset whose __iter__ does"
    if isinstance(data, str | bytes | os.PathLike):
        return f"{kind} is not a data set: load the data that it names and give {pair}"
    if isinstance(data, set | frozenset):
        return "a set has no order: give a list of its samples"
    if type(data).__module__.partition(".")[0] in _TABLES:
        return f"a {kind} is not a data set: give its columns as arrays (.to_numpy()), {pair}"
    if any(cls.__name__ == "_BaseDataLoaderIter" for cls in type(data).__mro__):
        return "an iterator of a DataLoader yields whole batches: give the DataLoader itself"
    if isinstance(data, list | tuple) and is_columns(data):
        return f"a {kind} of {len(data)} arrays is not a data set (each entry would be one sample): give {pair}"
    return None


def is_columns(data: Sequence[Any]) -> bool:
    """Return whether `[x, y]` means arrays of inputs and targets and not two samples.

    Arrays with the same number of rows and different shapes cannot be samples of one batch. Two arrays of one shape could be two
    samples, but are far more often inputs and targets.
    """
    if len(data) < 2 or not all(is_array(each) for each in data):
        return False
    shapes = [tuple(each.shape) for each in data]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or shapes[0][0] < 2:
        return False
    return len(set(shapes)) > 1 or len(data) == 2


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def is_mapping_of_arrays(data: Any) -> bool:
    """Return whether `data` is a mapping from names to columns."""
    return isinstance(data, Mapping) and bool(data) and all(map(is_array, data.values()))
