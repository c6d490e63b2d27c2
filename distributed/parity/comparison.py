"""Run the user's script on every backend and compare weights, losses and step times with those of one process.

All runs start from the first weights of the reference. In float64, no weight and no loss may differ from the reference
by more than a tolerance. In float32, rounding alone makes runs differ. The difference is large if rounding decides the sign at
a ReLU or the maximum of a pooling window. The float32 limit is therefore a multiple of the difference that rounding causes in
the reference itself: between its float32 and float64 runs, and between runs that cut the same batches into different slices.

The reference is one process on `single`. A backend of another framework is compared with this reference, and with one
process of its own framework.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distributed.backends.capabilities import capabilities_of
from distributed.config.plan import BatchPlan
from distributed.config.registry import REGISTRY, default_backend
from distributed.errors import DistributedError, ResourceError, TrainingError
from distributed.parity.runs import Cell, ParityOptions, Start, Trained, run

REFERENCE = default_backend(1)
FLOORS = 3  # the float32 limit, as a multiple of the difference that rounding causes in the reference
FIRST_LOSS = 1e-6  # limit of the first update's loss in float32, before rounding errors grow
_SPACING = 2.0**-23  # spacing of float32 numbers near 1: the smallest difference that float32 can show


@dataclasses.dataclass(frozen=True)
class Compared:
    """The differences between a run and a reference."""

    cell: Cell
    reference: str  # the backend of the reference
    weights: float
    losses: float
    first_loss: float
    step_s: float
    verdict: str = ""  # "ok", "FAR", "floor", "reference", "split"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A backend or a run that was left out or failed."""

    what: str
    reason: str
    is_failure: bool = False


@dataclasses.dataclass
class ParityResult:
    """The runs that were compared with their references, and those that could not be."""

    script: str
    steps: int
    tolerance: float
    batch: BatchPlan | None = None
    batch_dependent: tuple[str, ...] = ()
    compared: list[Compared] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    # reference -> the largest difference of its weights that rounding alone causes in float32
    floors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Return whether no run was too far from its reference and none failed."""
        return not any(each.verdict == "FAR" for each in self.compared) and not any(s.is_failure for s in self.skipped)


def measure(options: ParityOptions, on_start: Callable[[Cell], None]) -> ParityResult:
    """Start all runs and return the result.

    Args:
        options: what to run.
        on_start: called with the run that is about to start.

    Raises:
        DistributedError: no reference can run.
    """
    result = ParityResult(options.script, options.steps, options.tolerance)
    runs = _Runs(options, on_start)
    backends = list(_usable(options, result))
    references = _references(options, backends, runs, result)
    for name, own in references.items():
        result.compared += [_compared(Cell(name, 1, dtype), name, each, each) for dtype, each in own.items()]
        _add_floors(options, name, own, runs, result)
    for backend in backends:
        _add_backend(options, backend, references, runs, result)
    result.compared = [dataclasses.replace(each, verdict=_verdict(each, result)) for each in result.compared]
    return result


class _Runs:
    """Start each run once and keep its result. All runs start from the first weights of the first run."""

    def __init__(self, options: ParityOptions, on_start: Callable[[Cell], None]) -> None:
        self._options, self._on_start = options, on_start
        self._start: Start | None = None
        self._done: dict[Cell, Trained] = {}

    def of(self, cell: Cell) -> Trained:
        if cell not in self._done:
            self._on_start(cell)
            self._done[cell] = run(self._options, cell, self._start)
            self._start = self._start or self._done[cell].start
        return self._done[cell]


def _usable(options: ParityOptions, result: ParityResult) -> Iterator[str]:
    """Yield the backends whose libraries are installed.

    Other backends are added to the result as skipped. If the user named the backends, raise ResourceError instead.
    """
    for name in options.backends:
        found = capabilities_of(REGISTRY[name])
        if not found.missing:
            yield name
            continue
        verb = "is" if len(found.missing) == 1 else "are"
        reason = f"needs {', '.join(found.missing)}, which {verb} not installed: run {found.install}"
        if not options.is_all:
            raise ResourceError(f"backend {name!r} {reason}")
        result.skipped.append(Skipped(name, reason))


# ------------------------------------------------------------------ references and floors


def _references(
    options: ParityOptions, backends: Sequence[str], runs: _Runs, result: ParityResult
) -> dict[str, dict[str, Trained]]:
    """Return the runs of the references by name and element type.

    The references are `single`, and one process of each framework that `backends` use.
    """
    found: dict[str, dict[str, Trained]] = {}
    errors: dict[str, DistributedError] = {}
    for name in dict.fromkeys([REFERENCE, *(REGISTRY[backend].alone for backend in backends)]):
        try:
            found[name] = {cell.dtype: _trained(cell, runs) for cell in reversed(list(cells_of(name, (1,))))}
        except DistributedError as error:
            errors[name] = error
    if not found:
        raise next(iter(errors.values()))
    needed = [errors[alone] for alone in (REGISTRY[backend].alone for backend in backends) if alone in errors]
    refusals = [each for each in needed if not isinstance(each, TrainingError)]
    if refusals and not options.is_all:
        raise refusals[0]
    for name, each in errors.items():
        result.skipped.append(Skipped(name, str(each), is_failure=isinstance(each, TrainingError)))
    first = next(iter(found.values()))["float32"]
    result.batch, result.batch_dependent = first.batch, first.batch_dependent
    return found


def _trained(cell: Cell, runs: _Runs) -> Trained:
    try:
        return runs.of(cell)
    except TrainingError as error:
        hint = _FLOAT64_HINT if cell.dtype == "float64" and "dtype" in str(error) else ""
        raise TrainingError(f"{cell}: {error}{hint}") from None


_FLOAT64_HINT = "; parity also trains in float64: create tensors with the dtype of the batch, such as torch.randn(n, 4, dtype=x.dtype)"


def _add_floors(
    options: ParityOptions, name: str, own: Mapping[str, Trained], runs: _Runs, result: ParityResult
) -> None:
    """Measure the difference that rounding causes in a reference in float32.

    The float32 run is compared with the float64 run, and with runs that cut their batches as each world size would.
    """
    reference = own["float32"]
    moved = [_compared(Cell(name, 1, "float32", 0), name, own["float64"], reference)] if "float64" in own else []
    for cut in sorted({max(2, world) for world in options.world_sizes}):
        cell = Cell(name, 1, "float32", cut)
        moved.append(_compared(cell, name, _trained(cell, runs), reference))
    largest = max((float(abs(value).max()) for value in reference.weights.values() if value.size), default=1.0)
    by_rounding = [each.weights for each in moved if each.cell.cut == 0 or not result.batch_dependent]
    result.floors[name] = max([_SPACING * largest, *by_rounding])
    result.compared += moved


def _add_backend(
    options: ParityOptions,
    backend: str,
    references: Mapping[str, Mapping[str, Trained]],
    runs: _Runs,
    result: ParityResult,
) -> None:
    """Compare every world size and element type of one backend with each of its references."""
    own = REGISTRY[backend].alone
    beside = [name for name in dict.fromkeys((REFERENCE, own)) if name in references]
    if own not in references:  # the report already has the error of this reference
        if own != backend:
            reason = f"there is nothing to compare it with, as {own} could not run the script"
            result.skipped.append(Skipped(backend, reason))
        return
    for cell in cells_of(backend, options.world_sizes):
        try:
            trained = runs.of(cell)
        except TrainingError as error:
            result.skipped.append(Skipped(str(cell), str(error), is_failure=True))
        except DistributedError as error:  # the backend refuses this script or this number of processes
            result.skipped.append(Skipped(str(cell), str(error), is_failure=not options.is_all))
            return
        else:
            others = [name for name in beside if cell != Cell(name, 1, cell.dtype)]
            result.compared += [_compared(cell, name, trained, references[name][cell.dtype]) for name in others]


def cells_of(backend: str, world_sizes: Sequence[int]) -> Iterator[Cell]:
    """Yield the runs of a backend, float64 first if it supports that."""
    found = capabilities_of(REGISTRY[backend])
    for world in (1,) if REGISTRY[backend].single_process else world_sizes:
        for dtype in ("float64", "float32"):
            if found.accepts(f"dtype={dtype}"):
                yield Cell(backend, world, dtype)


# ------------------------------------------------------------------ measures


def _compared(cell: Cell, name: str, trained: Trained, reference: Trained) -> Compared:
    first = min((key for key in reference.losses if key[0] == "train"), default=("train", 1))
    return Compared(
        cell,
        name,
        weights=farthest(trained.weights, reference.weights),
        losses=farthest(trained.losses, reference.losses),
        first_loss=abs(trained.losses.get(first, math.nan) - reference.losses.get(first, math.nan)),
        step_s=trained.step_s,
    )


def farthest(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> float:
    """Return the largest absolute difference between two sets of arrays.

    Return infinity if their names or shapes differ, or if a value is not finite.
    """
    import numpy

    if one.keys() != other.keys():
        return math.inf
    largest = 0.0
    for name, value in one.items():
        a, b = numpy.asarray(value), numpy.asarray(other[name])
        if a.shape != b.shape:
            return math.inf
        if a.size:
            difference = float(numpy.abs(a - b).max())
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def _verdict(each: Compared, result: ParityResult) -> str:
    """Return the verdict on a comparison. It is "split" if the script's results depend on how batches are split."""
    cell = each.cell
    if cell.cut > 1 and result.batch_dependent:
        return "split"
    if cell.cut != 1:
        return "floor"
    if cell == Cell(each.reference, 1, cell.dtype):
        return "reference"
    if result.batch_dependent and cell.world_size > 1:
        return "split"
    if cell.dtype == "float64":
        return "ok" if max(each.weights, each.losses) <= result.tolerance else "FAR"
    # If rounding alone makes the reference NaN or infinite, no run can be shown to be near it.
    is_near = each.weights <= FLOORS * result.floors[each.reference] < math.inf and each.first_loss <= FIRST_LOSS
    return "ok" if is_near else "FAR"
