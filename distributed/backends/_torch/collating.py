"""Choose how samples become a batch: by the user's collate function, by padding, or as rows of a Hugging Face data set."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from distributed.backends.base import TARGET_NAMES
from distributed.errors import ConfigError
from distributed.state import Job

_LABELS = ("label", "label_ids")  # names of the targets in data sets, which models of transformers call `labels`
_IGNORED = -100  # the label that losses of transformers leave out
_Row = Mapping[str, Any]


@dataclasses.dataclass
class Columns:
    """The columns of Hugging Face data sets that reach the model: those that its `forward` names, and the targets.

    `read` finds them once the model is built. Before that, all columns are kept.
    """

    is_fixed: bool  # whether all columns are always kept: for a `training_step`, an own loop, several models, or by the setting
    has_loss_fn: bool
    names: frozenset[str] | None = None
    arguments: frozenset[str] = frozenset()  # names of the arguments of the model's `forward`
    seen: list[str] = dataclasses.field(default_factory=list)  # the columns of the data sets of this trainer

    def see(self, dataset: Any) -> None:
        """Remember the columns of `dataset` for `read`."""
        self.seen += [name for name in getattr(dataset, "column_names", None) or () if name not in self.seen]

    def read(self, model: torch.nn.Module, notice: Callable[[str], None]) -> None:
        """Find the columns that `model` takes. Show a notice that names the columns of the data sets that are dropped."""
        if self.is_fixed:
            return
        names = _argument_names(model)
        if not names:
            return
        self.arguments, self.names = frozenset(names), frozenset({*names, *_LABELS, *TARGET_NAMES})
        if dropped := [name for name in self.seen if name not in self.names]:
            kind = type(model).__name__
            notice(
                f"columns that {kind}.forward does not take are dropped: {', '.join(dropped)}"
                " (data.remove_unused_columns=false keeps them)"
            )

    def kept(self, row: _Row) -> _Row:
        """Return the entries of `row` that reach the model or the collate function, by their own names."""
        return {name: value for name, value in row.items() if self.names is None or name in self.names}

    def renamed(self, row: _Row, *, is_tokenized: bool) -> _Row:
        """Return `row` with its targets under the name `labels`, which models of transformers and their collators use."""
        others = {name for name in _LABELS if name in row and name not in self.arguments}
        if "labels" in row:  # a model that does not name `label` would refuse it
            return row if self.names is None else {name: value for name, value in row.items() if name not in others}
        if not is_tokenized and (self.names is None or self.has_loss_fn):
            return row
        return {"labels" if name in others else name: value for name, value in row.items()}


_ALL = Columns(is_fixed=True, has_loss_fn=False)  # for rows that do not come from a Hugging Face data set


def _argument_names(model: Any) -> list[str]:
    """Return the arguments that the model's `forward` names. A model with adapters takes those of its base model."""
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(base.forward).parameters.items() if each.kind in kinds]


@dataclasses.dataclass(frozen=True)
class Batching:
    """Define how the samples of a trainer's data sets become batches."""

    collate_fn: Callable[[Any], Any] | None
    processing: Any
    columns: Columns

    @classmethod
    def of(cls, job: Job, *, removes_columns: bool) -> Batching:
        """Return the Batching of `job`."""
        is_fixed = bool(job.names) or job.is_own_loop or job.training_step is not None or not removes_columns
        return cls(job.collate_fn, job.processing_class, Columns(is_fixed, job.loss_fn is not None))

    def collate_of(self, dataset: Any, loader: DataLoader[Any] | None, name: str) -> Callable[[Any], Any]:
        """Return the function that makes a batch of samples of `dataset`.

        Raises ConfigError if both the trainer and the loader have one.
        """
        own = None if loader is None or loader.collate_fn is default_collate else loader.collate_fn
        if own is not None and self.collate_fn is not None:
            raise ConfigError(
                f"{name}: Trainer(collate_fn={_name_of(self.collate_fn)}) and the DataLoader's collate_fn={_name_of(own)} both"
                " make the batches: drop one of them"
            )
        if own is not None:
            return own
        rows = is_rows(dataset)
        if rows:
            self.columns.see(_inner(dataset))
        if self.collate_fn is not None:
            return KeptColumns(self.columns, self.collate_fn) if rows else self.collate_fn
        if rows or can_pad(self.processing):
            return RowCollator(self.columns if rows else None, self.processing if can_pad(self.processing) else None)
        return default_collate


PLAIN = Batching.of(Job(None), removes_columns=True)  # for data that is read without the arguments of a trainer


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _inner(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def is_rows(dataset: Any) -> bool:
    """Return whether `dataset` is a data set of Hugging Face's `datasets`, or a Subset of one."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(_inner(dataset), (library.Dataset, library.IterableDataset))


def can_pad(processing: Any) -> bool:
    """Return whether `processing` pads sequences, as tokenizers do. A processor of images does not."""
    return callable(getattr(processing, "pad", None)) and bool(getattr(processing, "model_input_names", None))


class KeptColumns:
    """Call a collate function with rows that have only the columns that reach the model, under their own names."""

    def __init__(self, columns: Columns, collate_fn: Callable[[Any], Any]) -> None:
        self._columns, self._collate_fn = columns, collate_fn

    def __call__(self, rows: Sequence[_Row]) -> Any:
        return self._collate_fn([self._columns.kept(row) for row in rows])


class RowCollator:
    """Make a batch of rows: numbers become tensors, sequences are padded if there is a tokenizer, strings stay lists."""

    def __init__(self, columns: Columns | None, tokenizer: Any) -> None:
        self._columns, self._tokenizer = columns, tokenizer

    def __call__(self, rows: Sequence[Any]) -> Any:
        if not isinstance(rows[0], Mapping):
            return default_collate(list(rows))
        if self._columns is not None:
            rows = [self._columns.kept(row) for row in rows]
        inputs = self._names_of_inputs(rows[0])
        if self._columns is None and not inputs:
            return default_collate(list(rows))
        columns = self._columns or _ALL
        rows = [columns.renamed(row, is_tokenized=bool(inputs)) for row in rows]
        padded = self._padded(rows, inputs)
        return {name: padded[name] if name in padded else self._joined(name, rows) for name in rows[0]} | padded

    def _names_of_inputs(self, row: _Row) -> list[str]:
        """Return the names of the sequences that the tokenizer pads, or none if the row lacks the main input."""
        if self._tokenizer is None or getattr(self._tokenizer, "pad_token", "") is None:
            return []
        names = [name for name in self._tokenizer.model_input_names if name in row]
        return names if self._tokenizer.model_input_names[0] in names else []

    def _padded(self, rows: Sequence[_Row], names: list[str]) -> dict[str, Any]:
        if not names:
            return {}
        features = {name: [_plain(row[name]) for row in rows] for name in names}
        with _without_advice(self._tokenizer):
            return dict(self._tokenizer.pad(features, padding=True, return_tensors="pt"))

    def _joined(self, name: str, rows: Sequence[_Row]) -> Any:
        values = [row[name] for row in rows]
        if self._tokenizer is not None and name in ("labels", *_LABELS) and _is_sequence(values[0]):
            values = self._padded_labels(values)
        try:
            return _as_tensor(values)
        except (ValueError, RuntimeError, TypeError):
            raise ConfigError(self._ragged(name, values)) from None

    def _padded_labels(self, values: list[Any]) -> list[Any]:
        """Return label sequences of equal lengths, filled with -100 on the side on which the tokenizer pads."""
        plain = [list(_plain(value)) for value in values]
        longest = max(map(len, plain))
        filling = [[_IGNORED] * (longest - len(each)) for each in plain]
        is_left = getattr(self._tokenizer, "padding_side", "right") == "left"
        return [more + each if is_left else each + more for each, more in zip(plain, filling, strict=True)]

    def _ragged(self, name: str, values: list[Any]) -> str:
        lengths = sorted({len(value) for value in values if _is_sequence(value)})
        what = f"sequences of {lengths[0]} to {lengths[-1]} elements" if lengths else "values that make no tensor"
        fix = "pass tokenizer=..., which pads, or collate_fn=... to Trainer"
        if self._tokenizer is not None and getattr(self._tokenizer, "pad_token", "") is None:
            fix = "the tokenizer has no pad token: set tokenizer.pad_token = tokenizer.eos_token"
        elif self._tokenizer is not None:
            fix = f"the tokenizer pads {', '.join(self._tokenizer.model_input_names)} and labels: pass collate_fn=... to Trainer"
        return f"column {name!r} has {what} in one batch: {fix}"


@contextlib.contextmanager
def _without_advice(tokenizer: Any) -> Iterator[None]:
    """Hide the tokenizer's advice to let its call pad. The advice does not apply to rows that are tokenized already."""
    name, warned = "Asking-to-pad-a-fast-tokenizer", getattr(tokenizer, "deprecation_warnings", {})
    before = warned.get(name)
    warned[name] = True
    try:
        yield
    finally:
        warned[name] = bool(before)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or bool(getattr(value, "shape", ()))


def _as_tensor(values: list[Any]) -> Any:
    """Return numbers, or nested lists and arrays of them, as one tensor. Strings and other objects stay a list."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    if isinstance(first, (numpy.ndarray, numpy.generic)):
        joined = numpy.stack(values)
        return values if joined.dtype.kind in "OSUM" else torch.from_numpy(joined)
    if isinstance(first, (bool, int, float)) or (isinstance(first, (list, tuple)) and _holds_numbers(first)):
        return torch.tensor(values)
    return values


def _holds_numbers(value: Iterable[Any]) -> bool:
    first = next(iter(value), 0)
    return _holds_numbers(first) if isinstance(first, (list, tuple)) else isinstance(first, (bool, int, float))
