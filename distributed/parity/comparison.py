"""The user's script on every backend: how far its weights and losses are from those of one process, and how long a step takes.

All runs start from the first weights of the reference. float64: no weight and no loss further than a tolerance from it. float32:
rounding alone drives runs apart, and where it decides which side of a ReLU or which entry of a max-pooling counts, far apart. So
the measure is what rounding moves the reference itself: from its float64 run, and when it adds up the same batches in slices.

The reference is one process on `single`. A backend that computes with another framework stands beside that, and beside one
process of its own.
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
from distributed.parity.runs import Asked, Cell, Start, Trained, run

REFERENCE = default_backend(1)
FLOORS = 3  # times what the reference moves, in float32
FIRST_LOSS = 1e-6  # of the first update's loss in float32, before rounding had time to grow
_SPACING = 2.0**-23  # between float32 numbers near 1: nothing is nearer than that


@dataclasses.dataclass(frozen=True)
class Compared:
    """A run beside a reference."""

    cell: Cell
    reference: str  # the backend of that one process
    weights: float
    losses: float
    first_loss: float
    step_s: float
    verdict: str = ""  # "ok", "FAR", "floor", "reference", "split"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A backend, or a run of it, that was not made or failed."""

    what: str
    reason: str
    is_failure: bool = False


@dataclasses.dataclass
class Report:
    """All of it."""

    script: str
    steps: int
    tolerance: float
    batch: BatchPlan | None = None
    batch_dependent: tuple[str, ...] = ()
    compared: list[Compared] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    # reference -> how far rounding alone moves a weight of it in float32
    floors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether nothing was too far away and nothing failed."""
        return not any(each.verdict == "FAR" for each in self.compared) and not any(s.is_failure for s in self.skipped)


def measure(asked: Asked, say: Callable[[Cell], None]) -> Report:
    """Run everything; `say(cell)` before each run. Raises DistributedError where no reference can run."""
    report = Report(asked.script, asked.steps, asked.tolerance)
    runs = _Runs(asked, say)
    backends = list(_usable(asked, report))
    references = _references(asked, backends, runs, report)
    for name, own in references.items():
        report.compared += [_compared(Cell(name, 1, dtype), name, each, each) for dtype, each in own.items()]
        _add_floors(asked, name, own, runs, report)
    for backend in backends:
        _add_backend(asked, backend, references, runs, report)
    report.compared = [dataclasses.replace(each, verdict=_verdict(each, report)) for each in report.compared]
    return report


class _Runs:
    """Each run is made once. All start where the first one did."""

    def __init__(self, asked: Asked, say: Callable[[Cell], None]) -> None:
        self._asked, self._say = asked, say
        self._start: Start | None = None
        self._done: dict[Cell, Trained] = {}

    def of(self, cell: Cell) -> Trained:
        if cell not in self._done:
            self._say(cell)
            self._done[cell] = run(self._asked, cell, self._start)
            self._start = self._start or self._done[cell].start
        return self._done[cell]


def _usable(asked: Asked, report: Report) -> Iterator[str]:
    """The backends whose libraries are here; the others go into the report, or are an error where they were named."""
    for name in asked.backends:
        found = capabilities_of(REGISTRY[name])
        if not found.missing:
            yield name
            continue
        reason = f"needs {', '.join(found.missing)}, which is not installed: run {found.install}"
        if not asked.is_all:
            raise ResourceError(f"backend {name!r} {reason}")
        report.skipped.append(Skipped(name, reason))


# ------------------------------------------------------------------ references and floors


def _references(asked: Asked, backends: Sequence[str], runs: _Runs, report: Report) -> dict[str, dict[str, Trained]]:
    """The one process of `single`, and of each framework that `backends` compute with: name -> element type -> its run."""
    found: dict[str, dict[str, Trained]] = {}
    errors: dict[str, DistributedError] = {}
    for name in dict.fromkeys([REFERENCE, *(REGISTRY[backend].alone for backend in backends)]):
        try:
            found[name] = {cell.dtype: _said(cell, runs) for cell in reversed(list(cells_of(name, (1,))))}
        except DistributedError as error:
            errors[name] = error
    if not found:
        raise next(iter(errors.values()))
    needed = [errors[alone] for alone in (REGISTRY[backend].alone for backend in backends) if alone in errors]
    refusals = [each for each in needed if not isinstance(each, TrainingError)]
    if refusals and not asked.is_all:
        raise refusals[0]
    for name, each in errors.items():
        report.skipped.append(Skipped(name, str(each), is_failure=isinstance(each, TrainingError)))
    first = next(iter(found.values()))["float32"]
    report.batch, report.batch_dependent = first.batch, first.batch_dependent
    return found


def _said(cell: Cell, runs: _Runs) -> Trained:
    try:
        return runs.of(cell)
    except TrainingError as error:
        raise TrainingError(f"{cell}: {error}") from None


def _add_floors(asked: Asked, name: str, own: Mapping[str, Trained], runs: _Runs, report: Report) -> None:
    """What rounding moves a reference in float32: from its float64 run, and over as many slices as the worlds have."""
    reference = own["float32"]
    moved = [_compared(Cell(name, 1, "float32", 0), name, own["float64"], reference)] if "float64" in own else []
    for cut in sorted({max(2, world) for world in asked.world_sizes}):
        cell = Cell(name, 1, "float32", cut)
        moved.append(_compared(cell, name, _said(cell, runs), reference))
    largest = max((float(abs(value).max()) for value in reference.weights.values() if value.size), default=1.0)
    by_rounding = [each.weights for each in moved if each.cell.cut == 0 or not report.batch_dependent]
    report.floors[name] = max([_SPACING * largest, *by_rounding])
    report.compared += moved


def _add_backend(
    asked: Asked, backend: str, references: Mapping[str, Mapping[str, Trained]], runs: _Runs, report: Report
) -> None:
    """Every world size and element type of one backend, beside each reference that it has."""
    own = REGISTRY[backend].alone
    beside = [name for name in dict.fromkeys((REFERENCE, own)) if name in references]
    if own not in references:  # what is wrong there has been said
        if own != backend:
            reason = f"there is nothing to compare it with, as {own} could not run the script"
            report.skipped.append(Skipped(backend, reason))
        return
    for cell in cells_of(backend, asked.world_sizes):
        try:
            trained = runs.of(cell)
        except TrainingError as error:
            report.skipped.append(Skipped(str(cell), str(error), is_failure=True))
        except DistributedError as error:  # it refuses this script, or so many processes
            if not asked.is_all:
                raise
            report.skipped.append(Skipped(str(cell), str(error)))
            return
        else:
            others = [name for name in beside if cell != Cell(name, 1, cell.dtype)]
            report.compared += [_compared(cell, name, trained, references[name][cell.dtype]) for name in others]


def cells_of(backend: str, world_sizes: Sequence[int]) -> Iterator[Cell]:
    """The runs of a backend, float64 first where it has it."""
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
    """The largest difference of two sets of numbers; infinite where they have other names or shapes, or one is not finite."""
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


def _verdict(each: Compared, report: Report) -> str:
    cell = each.cell
    if cell.cut > 1 and report.batch_dependent:
        return "split"
    if cell.cut != 1:
        return "floor"
    if cell == Cell(each.reference, 1, cell.dtype):
        return "reference"
    if report.batch_dependent and cell.world_size > 1:
        return "split"
    if cell.dtype == "float64":
        return "ok" if max(each.weights, each.losses) <= report.tolerance else "FAR"
    # Where rounding alone drives the reference to no number at all, nothing can be shown to be near it.
    is_near = each.weights <= FLOORS * report.floors[each.reference] < math.inf and each.first_loss <= FIRST_LOSS
    return "ok" if is_near else "FAR"
