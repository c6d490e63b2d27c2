"""Compute metrics over all samples on torch: functions, torchmetrics objects by their states, and other objects."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from distributed.backends._torch.objective import scores
from distributed.backends._torch.outputs import Outputs, joined
from distributed.backends._torch.tensor_io import dtype_word, raw_bytes, tensor_of
from distributed.backends.failures import not_a_number
from distributed.backends.over_all import Measure, OutputsMeasure, Update, driven
from distributed.backends.parts import Arguments, Part, mapped
from distributed.checkpoints.tensor_file import RawTensor
from distributed.metrics.over_all import (
    OverAll,
    call_sklearn,
    has_state,
    is_of_keras,
    is_of_sklearn,
    takes_targets_first,
)

OBJECT = ("reset", "update", "compute")  # the methods of an object, as torchmetrics names them
_HALVES = (torch.float16, torch.bfloat16)


class TorchEngine:
    """Convert torch tensors, see `distributed.backends.over_all.MetricEngine`."""

    def joined(self, updates: Sequence[Update]) -> Arguments:
        """Return the arguments for all samples of `updates`."""
        args, named = joined([[Outputs(tuple(value), n) for value, n in update] for update in updates])
        whole: Arguments = widened(Arguments(args, named))
        return whole

    def to_raw(self, name: str, leaf: Any) -> RawTensor | None:
        """Return a tensor or a numeric array as bytes, or None for anything else."""
        if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(leaf)
        if not isinstance(leaf, torch.Tensor):
            return None
        return RawTensor(name, dtype_word("a metric's tensor", leaf), tuple(leaf.shape), lambda: raw_bytes(leaf))

    def from_raw(self, word: str, shape: tuple[int, ...], data: Any) -> torch.Tensor:
        """Return the tensor that `to_raw` was given."""
        return tensor_of(word, shape, data).clone()

    def number(self, name: str, value: Any) -> float:
        """Return a number as float. Tensors and arrays must have exactly one element."""
        if isinstance(value, torch.Tensor) or (hasattr(value, "item") and getattr(value, "size", 0) == 1):
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise not_a_number(name, value)
            value = value.item()
        if not isinstance(value, (bool, int, float)):
            raise not_a_number(name, value)
        return float(value)


ENGINE = TorchEngine()


def is_whole(metric: Any) -> bool:
    """Return whether `metric` is declared to be computed over all samples."""
    return isinstance(metric, OverAll) or has_state(metric)


def measure_of_function(function: Callable[..., Any], *, training: bool) -> Measure:
    """Return the Measure that computes a plain function over all samples."""
    return measure_of(OverAll(function, training=training), torch.device("cpu"), None)


def measure_of(metric: Any, device: torch.device, dtype: torch.dtype | None) -> Measure:
    """Return the Measure that computes `metric`. `dtype` is that of the run, or None for torch's default."""
    if isinstance(metric, OverAll):
        prepare = functools.partial(_prepared, functools.partial(_transformed, metric.transform))
        return OutputsMeasure(functools.partial(_called, metric), prepare, training=metric.training)
    if is_of_keras(metric):
        return _measure_of_keras(metric, device, dtype)
    own = copy.deepcopy(metric)
    _stop_synchronising(own)
    if (states := declared_states(own)) is not None:
        return StateMeasure(own, states, device, dtype)
    return OutputsMeasure(
        lambda updates: driven(own, updates, ENGINE, OBJECT), functools.partial(_prepared, with_scores)
    )


def _measure_of_keras(metric: Any, device: torch.device, dtype: torch.dtype | None) -> Measure:
    from distributed.backends._keras import measures
    from distributed.backends._torch.keras_module import keras_scope

    scope = functools.partial(keras_scope, device, "float64" if dtype is torch.float64 else "float32")
    return measures.measure_of(metric, ENGINE, scope, functools.partial(_prepared, with_scores))


def _called(metric: OverAll, updates: Sequence[Update]) -> Any:
    args, named = ENGINE.joined(updates)
    if takes_targets_first(metric.function):
        args = (args[1], args[0], *args[2:])
    if is_of_sklearn(metric.function):
        return call_sklearn(metric, mapped(args, _array), mapped(named, _array))
    with torch.no_grad():
        value = metric.function(*args, **named, **metric.arguments)
    is_each = isinstance(value, torch.Tensor) and value.numel() != 1  # a value per sample, to be averaged
    return (value.sum(), value.numel()) if is_each else value


def _array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


# ------------------------------------------------------------------ what is kept


def _transformed(transform: Callable[[Any], Any] | str | None, call: Arguments) -> Arguments:
    """Return `call` with the outputs, its first argument, replaced by the result of `transform`."""
    if transform is None or not call.args:
        return call
    outputs, *more = call.args
    if isinstance(transform, str):
        dim = {} if transform == "sigmoid" else {"dim": -1}
        return call._replace(args=(getattr(torch, transform)(scores(outputs), **dim), *more))
    return call._replace(args=(transform(outputs), *more))


def with_scores(call: Arguments) -> Arguments:
    """Return `call` with model outputs replaced by the scores that they contain, because metric objects take scores."""
    return call._replace(args=tuple(scores(each) for each in call.args))


def on_host(call: Arguments) -> Arguments:
    """Return the arguments of a metric with their tensors on the host."""
    kept: Arguments = mapped(call, _on_host)
    return kept


def _prepared(change: Callable[[Arguments], Arguments], call: Arguments) -> Arguments:
    with torch.no_grad():
        kept: Arguments = mapped(change(call), _on_host)
    return kept


def _on_host(leaf: Any) -> Any:
    """Return the tensor on the host, in its own memory. A row of a large tensor would keep the whole tensor alive."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf.cpu() if leaf.device.type != "cpu" else leaf.clone() if leaf._base is not None else leaf


def widened(call: Any) -> Any:
    """Return `call` with 16-bit floats converted to float32, because sums of 16-bit floats lose precision."""
    return mapped(call, lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in _HALVES else x)


# ------------------------------------------------------------------ states of torchmetrics


def declared_states(metric: Any) -> dict[str, Any] | None:
    """Return path -> module of the metrics inside `metric`, or None if a declared state cannot be combined over ranks.

    Sums, minima, maxima and lists can be combined. "mean" can be combined in torchmetrics' own metrics, which declare
    it for constants that have the same value on every rank. torchmetrics combines states in the same way, but here
    ranks without samples are left out, and the states may come from a different number of ranks.
    """
    members = dict(metric.named_modules()) if isinstance(metric, torch.nn.Module) else {"": metric}
    found = {path: each for path, each in members.items() if _declares(each)}
    if not found or (not _declares(metric) and not _is_collection(metric)):
        return None
    return found if all(map(_can_be_merged, found.values())) else None


def _declares(metric: Any) -> bool:
    return isinstance(getattr(metric, "_defaults", None), dict) and isinstance(
        getattr(metric, "_reductions", None), dict
    )


def _is_collection(metric: Any) -> bool:
    return isinstance(metric, torch.nn.ModuleDict)


def _can_be_merged(metric: Any) -> bool:
    is_of_library = type(metric).__module__.startswith("torchmetrics.")
    for name, default in metric._defaults.items():
        word = _word(metric._reductions[name])
        if isinstance(default, list):
            if word not in ("cat", "none"):
                return False
        elif word not in ("sum", "max", "min") and not (word == "mean" and is_of_library):
            return False
    return True


def _word(reduction: Any) -> str:
    """Return the reduction's torchmetrics name, such as "sum" or "cat", or "none" without a reduction."""
    if reduction is None:
        return "none"
    return str(getattr(reduction, "__name__", "")).removeprefix("dim_zero_")


class StateMeasure:
    """Compute a metric of torchmetrics from its states.

    Entries of list states are kept like outputs; all other states stay in the metric. `value` combines the states of
    all ranks, in the order of ranks.
    """

    training = True

    def __init__(
        self, metric: Any, members: Mapping[str, Any], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._metric, self._members = metric, dict(members)
        metric.to(device)
        if dtype is not None:
            for member in self._members.values():
                member.set_dtype(dtype)
        self._collected = _members_of(metric)
        self._parts: list[Part] = []
        metric.reset()

    def absorb(self, part: Part) -> None:
        """Update the metric with one part."""
        args, named = widened(with_scores(part.value))
        with torch.no_grad():
            for each in self._collected.values():
                each.update(*args, **each._filter_kwargs(**named))
        lists = [getattr(member, name) for member, name in self._lists()]
        if lists:
            self._parts.append(part._replace(value=[list(each) for each in lists]))
        for each in lists:
            each.clear()

    def _lists(self) -> list[tuple[Any, str]]:
        return [
            (member, name)
            for member in self._members.values()
            for name, default in member._defaults.items()
            if isinstance(default, list)
        ]

    def take(self) -> list[Part]:
        """Return the new entries of list states and remove them."""
        taken = [part._replace(value=mapped(part.value, _on_host)) for part in self._parts]
        self._parts = []
        return taken

    def state(self) -> dict[str, Any] | None:
        """Return path -> (number of updates, states that are not lists), or None if there was no update."""
        if not any(member._update_count for member in self._members.values()):
            return None
        return {
            path: (
                int(member._update_count),
                {
                    name: _on_host(getattr(member, name)).clone()
                    for name, default in member._defaults.items()
                    if not isinstance(default, list)
                },
            )
            for path, member in self._members.items()
        }

    def restore(self, states: Sequence[Any]) -> None:
        """Replace the states of the metric by the combined states of one or several ranks."""
        self._metric.reset()
        if not states:
            return
        for path, member in self._members.items():
            member._update_count = sum(int(state[path][0]) for state in states)
            member._computed = None
            for name, default in member._defaults.items():
                if not isinstance(default, list):
                    values = [state[path][1][name] for state in states if state[path][0]]
                    merged = _merged(values, _word(member._reductions[name]), default)
                    setattr(member, name, merged.to(getattr(member, name).device))

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> Any:
        """Return the metric computed from the states and list entries of all ranks."""
        own = self.state()
        try:
            self.restore(states)
            if updates:
                self._fill(updates)
            values = {name: each.compute() for name, each in self._collected.items()}
        finally:
            self.restore([own] if own is not None else [])
        return values if _is_collection(self._metric) else values[""]

    def _fill(self, updates: Sequence[Update]) -> None:
        for (member, name), entries in zip(self._lists(), _entries(updates), strict=True):
            setattr(member, name, [_to(each, member.device) for each in entries])

    def reset(self) -> None:
        """Remove all states and kept entries."""
        self._parts.clear()
        self._metric.reset()


def _members_of(metric: Any) -> dict[str, Any]:
    """Return name -> metric. Each of these metrics is updated and computed separately.

    Workaround (torchmetrics 1.9, Lightning-AI/torchmetrics#2596; may go when a collection shares states only on request): it shares
    states between its metrics.
    """
    return dict(metric.items(keep_base=False, copy_state=True)) if _is_collection(metric) else {"": metric}


def _stop_synchronising(metric: Any) -> None:
    """Turn off the synchronisation of all torchmetrics metrics inside `metric`.

    Their states are combined here instead.
    """
    members: list[Any] = list(metric.modules()) if isinstance(metric, torch.nn.Module) else []
    for member in members:
        if hasattr(member, "sync_on_compute"):
            member.sync_on_compute = member._to_sync = False
            member.distributed_available_fn = _never


def _never() -> bool:
    return False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make torch report in this block, for this thread, that no process group is initialized.

    The other ranks do not run the block at the same time. Workaround (torchmetrics 1.9, no upstream issue known; may go
    when torchmetrics can be told not to synchronise in a block): a torchmetrics object computed by a user's function
    would wait for them.
    """
    before, here = torch.distributed.is_initialized, threading.get_ident()

    def is_initialized() -> bool:
        return threading.get_ident() != here and before()

    torch.distributed.is_initialized = is_initialized
    try:
        yield
    finally:
        torch.distributed.is_initialized = before


def _merged(values: Sequence[torch.Tensor], word: str, default: torch.Tensor) -> torch.Tensor:
    """Combine one state of several ranks by the reduction `word`. `default` is the state without updates."""
    if not values:
        return default.clone()
    if len(values) == 1:
        return values[0].clone()
    stacked = torch.stack(list(values))
    if word == "sum":
        more = (len(values) - 1) * default.to(stacked.device)
        return stacked.sum(0).to(stacked.dtype) - more if bool(more.any()) else stacked.sum(0).to(stacked.dtype)
    if word == "mean":
        return values[0].clone() if bool((stacked == stacked[0]).all()) else stacked.mean(0)
    merged: torch.Tensor = stacked.amax(0) if word == "max" else stacked.amin(0)
    return merged


def _entries(updates: Sequence[Update]) -> list[list[Any]]:
    """Return the entries of each list state.

    They are in the order of the samples if each entry has one row per sample, else in the order of the ranks.
    """
    if all(
        all(isinstance(e, torch.Tensor) and e.dim() and len(e) == n for entries in value for e in entries)
        and len({len(entries) for entries in value}) == 1 == len(value[0])
        for update in updates
        for value, n in update
    ):
        woven = [joined([[Outputs(tuple(e[0] for e in value), n) for value, n in update]]) for update in updates]
        if all(isinstance(leaf, torch.Tensor) for each in woven for leaf in each):
            return [[each[i] for each in woven] for i in range(len(woven[0]))]
    values = [value for update in updates for value, _ in update]
    return [[entry for value in values for entry in value[i]] for i in range(len(values[0]))]


def _to(value: Any, device: torch.device) -> Any:
    return mapped(value, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
