"""Compute metrics over all samples: keep their arguments on each rank, gather them, and store them in checkpoints.

Loads no framework. A `MetricEngine` handles the tensors of each engine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from distributed.backends.failures import Failures
from distributed.backends.parts import Arguments, Part, RankedPart, by_update, micro_batches, num_bytes
from distributed.backends.parts_file import read_metrics, write_metrics
from distributed.backends.world import World

SPLITS = ("train", "val")
_WARN_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 20  # limit of bytes that one collective sends from each rank

# (arguments, number of samples) from each rank, for one micro-batch over all ranks. With n ranks, rank r has every n-th
# sample, beginning with sample r.
Update = list[tuple[Any, int]]


# Returns a context manager that restores the states of the random generators at its end.
KeepingGenerators = Callable[[], contextlib.AbstractContextManager[None]]


class MetricEngine(Protocol):
    """Convert the tensors of an engine for the metrics."""

    def joined(self, updates: Sequence[Update]) -> Arguments:
        """Return the arguments for all samples of `updates`, in their order, as the user's function takes them."""

    def to_raw(self, name: str, leaf: Any) -> Any:
        """Return a tensor on the host as a `RawTensor`, or None if `leaf` is not a tensor."""

    def from_raw(self, word: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return the tensor that `to_raw` was given."""

    def number(self, name: str, value: Any) -> float:
        """Return the `value` of metric `name` as a float. Raises TrainingError with the metric's name if it is not a
        number."""


class Measure(Protocol):
    """Compute one metric over the samples of all ranks."""

    training: bool  # whether the metric is computed in training too

    def absorb(self, part: Part) -> None:
        """Add a micro-batch. Called in the order of the samples."""

    def take(self) -> list[Part]:
        """Return the parts that the main process needs, on the host, and drop them on this rank."""

    def state(self) -> Any:
        """Return a copy of the state of this rank, or None. It consists of containers of host tensors, numbers and strings."""

    def restore(self, states: Sequence[Any]) -> None:
        """Continue from `states`, which `state` returned on one rank, or on several ranks that this rank replaces."""

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> Any:
        """Return the value of the metric. `updates` holds the parts and `states` the states of all ranks."""

    def reset(self) -> None:
        """Drop everything kept."""


class Wholes:
    """Hold the metrics over all samples of one trainer, separately for training and for evaluation."""

    def __init__(
        self,
        engine: MetricEngine,
        world: World,
        *,
        is_presharded: bool,
        warn: Callable[[str], None],
        keeping_generators: KeepingGenerators = contextlib.nullcontext,
    ) -> None:
        """Create the object without metrics.

        The code of metrics runs in blocks of `keeping_generators`, so that its random numbers do not change training.
        """
        self.keeping_generators = keeping_generators
        self._engine, self._world, self._warn = engine, world, warn
        self._rank, self.world_size, self._is_presharded = world.rank, world.world_size, is_presharded
        self._measures: dict[str, dict[str, Measure]] = {split: {} for split in SPLITS}
        self._closed: set[str] = set()  # metrics whose computation in training begins with the next epoch
        self._pieces: dict[str, dict[str, list[RankedPart]]] = {
            split: {} for split in SPLITS
        }  # filled on the main process only
        self._pending: dict[str, list[Any]] = {
            split: [] for split in SPLITS
        }  # results whose parts are not absorbed yet
        self._pending_bytes = dict.fromkeys(SPLITS, 0)
        self._kept_bytes, self._has_warned = dict.fromkeys(SPLITS, 0), False
        self._stored: dict[str, Any] = {}  # checkpointed states of metrics that have not been added yet
        self._is_resumed = False  # whether the running epoch was resumed from a checkpoint
        self.failures = Failures()

    # ------------------------------------------------------------------ which metrics

    def add(self, name: str, make: Callable[[], Measure]) -> None:
        """Compute `name` from now on. Does nothing if it is known already."""
        if self.has(name):
            return
        self._measures["val"][name] = make()
        if (measure := make()).training:
            self._measures["train"][name] = measure
            if name in self._stored:
                self._open(name)
            elif self._is_resumed:
                self._closed.add(name)

    def take_up(self, name: str, make: Callable[[bool], Measure], pieces_of: str | None) -> None:
        """Compute `name` from the next evaluation on.

        In training, begin with the next epoch, or continue with the parts that were kept in this epoch for the metric
        `pieces_of`. `make(training)` returns the measure.
        """
        self._measures["val"][name] = make(False)
        self._measures["train"][name] = make(True)
        if pieces_of is not None:
            self._pieces["train"][name] = [
                RankedPart(key, piece.rank, num_samples, value)
                for piece in self._pieces["train"].get(pieces_of, ())
                for key, num_samples, value in micro_batches(piece.key, piece.num_samples, piece.value)
            ]
            self._kept_bytes["train"] += sum(num_bytes(piece.value) for piece in self._pieces["train"][name])
            return
        self._closed.add(name)
        if name in self._stored:
            self._open(name)

    def measure_of(self, split: str, name: str) -> Measure:
        """Return the measure that computes `name` in `split`."""
        return self._measures[split][name]

    def has(self, name: str) -> bool:
        """Return whether `name` is computed over all samples."""
        return name in self._measures["val"]

    def drop(self, name: str) -> None:
        """Stop computing `name`, and free everything kept for it."""
        for split in SPLITS:
            self._measures[split].pop(name, None)
            self._kept_bytes[split] -= sum(num_bytes(piece.value) for piece in self._pieces[split].pop(name, []))
            for result in self._pending[split]:
                parts = result.deferred.parts if result.deferred else {}
                self._pending_bytes[split] -= sum(num_bytes(part.value) for part in parts.pop(name, []))

    def names(self, split: str) -> list[str]:
        """Return the names of the metrics that are computed in `split` now."""
        return [name for name in self._measures[split] if split != "train" or name not in self._closed]

    # ------------------------------------------------------------------ keeping parts

    def keep(self, split: str, result: Any) -> None:
        """Keep the result of a step, whose `deferred` holds parts by name.

        The parts are absorbed at the next log line, or with the next result if they are large. They cannot be absorbed
        earlier, because it is not known yet whether the update is made.
        """
        if self._pending_bytes[split] > _CHUNK_BYTES:
            self._absorb(split)
        parts: dict[str, Sequence[Part]] = result.deferred.parts
        for name in [name for name in parts if name not in self._measures[split]]:
            del parts[name]  # the metric was dropped while the step ran
        if parts:
            self._pending[split].append(result)
            self._pending_bytes[split] += sum(num_bytes(part.value) for each in parts.values() for part in each)

    def begin(self, split: str) -> None:
        """Drop everything kept of `split`."""
        self._pending[split].clear()
        self._pending_bytes[split] = self._kept_bytes[split] = 0
        self._pieces[split].clear()
        for measure in self._measures[split].values():
            measure.reset()
        if split == "train":
            self._closed.clear()
            self._stored.clear()
            self._is_resumed = False

    def measure(self, split: str) -> dict[str, float]:
        """Return name -> value over all samples since `begin`. A collective.

        The main process computes the values. If that fails, all ranks raise its error.
        """
        names = self.names(split)
        if not names:
            return {}
        self._collect(split)
        states = self._states(split, names)
        answer: dict[str, float] = {}
        with self.keeping_generators():
            for name in names if self._rank == 0 else ():
                with self.failures.noting(name):
                    answer |= self._value(split, name, [each[name] for each in states])
        found: dict[str, float]
        found, failure = self._world.broadcast([answer, self.failures.described])
        self.failures.raise_together([failure])
        return found

    def _states(self, split: str, names: Sequence[str]) -> list[dict[str, Any]]:
        with self.keeping_generators():
            mine = {name: self._measures[split][name].state() for name in names}
        return self._world.gather(mine)

    def _value(self, split: str, name: str, states: Sequence[Any]) -> dict[str, float]:
        pieces = self._pieces[split].get(name, [])
        known = [state for state in states if state is not None]
        if not pieces and not known:
            return {}
        value = self._measures[split][name].value(by_update(pieces, self._is_presharded), known)
        return dict(value if not name else self.numbers(name, value))  # the check, named "", returns names itself

    def numbers(self, name: str, value: Any) -> Iterable[tuple[str, float]]:
        """Yield (name, number) for the `value` that a metric returned, or a pair for each entry if `value` is a
        mapping."""
        if isinstance(value, Mapping):
            for key, each in value.items():
                yield from self.numbers(f"{name}_{key}", each)
        elif isinstance(value, tuple) and len(value) == 2:
            total, count = (self._engine.number(name, each) for each in value)
            yield name, total / count if count else math.nan
        else:
            yield name, self._engine.number(name, value)

    # ------------------------------------------------------------------ collecting parts

    def _absorb(self, split: str) -> None:
        with self.keeping_generators():
            for result in self._pending[split]:
                self._absorb_result(split, result)
        self._pending[split].clear()
        self._pending_bytes[split] = 0

    def _absorb_result(self, split: str, result: Any) -> None:
        if not result.deferred:
            return
        for name, parts in result.deferred.parts.items():
            if (measure := self._measures[split].get(name)) is not None:
                with self.failures.noting(name):
                    for part in parts:
                        measure.absorb(part)
        result.deferred.parts.clear()  # freed early, because the loop keeps results for longer and devices have little memory

    def _collect(self, split: str) -> None:
        """Send the parts of all ranks to the main process, in chunks. A collective."""
        self._absorb(split)
        mine = [(name, part) for name, measure in self._measures[split].items() for part in measure.take()]
        size = float(sum(num_bytes(part.value) for _, part in mine))
        has_failed = self.failures.error is not None
        total = self._world.reduce({"size": size, "any": float(bool(mine)), "failed": float(has_failed)})
        if total["failed"]:
            self.failures.raise_together(self._world.gather(self.failures.described))
        if not total["any"]:
            return
        self._kept_bytes[split] += int(total["size"])
        rounds = 1 + int(total["size"] / self.world_size) // _CHUNK_BYTES
        for number in range(rounds):
            begin, end = (len(mine) * n // rounds for n in (number, number + 1))
            for rank, sent in enumerate(self._world.gather(mine[begin:end])):
                for name, part in sent if self._rank == 0 else ():
                    piece = RankedPart(part.key, rank + part.replica, part.num_samples, part.value)
                    self._pieces[split].setdefault(name, []).append(piece)
        self._warn_of_size(split)

    def _warn_of_size(self, split: str) -> None:
        size = self._kept_bytes[split]
        if size > _WARN_BYTES and not self._has_warned and self._rank == 0:
            self._has_warned = True
            names = ", ".join(sorted(filter(None, self._pieces[split])))
            self._warn(
                f"the metrics over all samples ({names}) keep {size / (1 << 30):.1f} GiB of outputs in the main process's host"
                " memory: pass over_all(..., transform=...) to keep less of them, over_all(..., training=False) to keep none in"
                " training, or a metric that keeps sums"
            )

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: Path) -> dict[str, Any] | None:
        """Write everything kept of the current epoch into `directory`, and return the rest of the state, JSON-able. A
        collective."""
        if not self._measures["val"]:
            return None
        names = self.names("train")
        self._collect("train")
        states = self._states("train", names)
        if self._rank == 0:
            content = {name: ([each[name] for each in states], self._pieces["train"].get(name, [])) for name in names}
            write_metrics(directory, content, self._engine)
        return {"open": names}

    def load(self, directory: Path, saved: Mapping[str, Any] | None) -> None:
        """Continue from a state that `save` wrote, with any number of ranks. Metrics that it does not contain begin
        with the next epoch."""
        self.begin("train")
        self._is_resumed = True
        content = read_metrics(directory, self._engine) if saved else {}
        self._stored = {name: content.get(name, ([], [])) for name in (saved or {}).get("open", ())}
        for name in list(self._measures["train"]):
            self._closed.add(name)
            if name in self._stored:
                self._open(name)

    def _open(self, name: str) -> None:
        """Compute `name` in this epoch, and continue from its state in the checkpoint."""
        states, pieces = self._stored.pop(name)
        self._closed.discard(name)
        if self._rank == 0:
            self._pieces["train"][name] = list(pieces)
            self._kept_bytes["train"] += sum(num_bytes(piece.value) for piece in pieces)
        if len(states) == self.world_size:
            mine = [states[self._rank]]
        else:
            mine = list(states) if self._rank == 0 else []
        self._measures["train"][name].restore([state for state in mine if state is not None])


class OutputsMeasure:
    """Compute a metric from all outputs, for a function or an object whose states cannot be combined."""

    def __init__(
        self,
        compute: Callable[[Sequence[Update]], Any],
        prepare: Callable[[Arguments], Arguments],
        *,
        training: bool = True,
    ) -> None:
        """Create the measure. `prepare` returns the arguments for a micro-batch on the host, in the form in which they
        are kept."""
        self._compute, self._prepare, self.training = compute, prepare, training
        self._parts: list[Part] = []

    def absorb(self, part: Part) -> None:
        """Keep the arguments for a micro-batch."""
        self._parts.append(part._replace(value=self._prepare(part.value)))

    def take(self) -> list[Part]:
        """Return all parts, and drop them."""
        taken, self._parts = self._parts, []
        return taken

    def state(self) -> Any:
        """Return None, because `take` returns everything."""
        return None

    def restore(self, states: Sequence[Any]) -> None:
        """Do nothing, because there is no state."""

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> Any:
        """Return the value for all samples."""
        return self._compute(updates)

    def reset(self) -> None:
        """Drop everything kept."""
        self._parts.clear()


def driven(metric: Any, updates: Sequence[Update], engine: MetricEngine, words: tuple[str, str, str]) -> Any:
    """Update a metric object with each of `updates` in turn, and return its value.

    `words` are the names of its methods that reset, update and compute.
    """
    reset, update, compute = (getattr(metric, word) for word in words)
    reset()
    for each in updates:
        args, named = engine.joined([each])
        update(*args, **named)
    return compute()


class Deferred(NamedTuple):
    """Hold the outputs and arguments of a step from which metrics are computed later."""

    split: str
    kept: list[Any]  # outputs, for the metrics that are means
    parts: dict[str, list[Part]]  # name of a metric over all samples -> its parts
