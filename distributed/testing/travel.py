"""Resume checkpoints of one adapter on other adapters and numbers of processes, compare the states, and make a table of
the differences."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.shards import read_tensors
from distributed.parity.comparison import farthest
from distributed.parity.runs import weights_of
from distributed.testing.adapter import Adapter
from distributed.testing.conformance import limit_of
from distributed.testing.running import Ran, References, Runner, run_python, train

# Names of Adam's moments in checkpoints.
MOMENTS = {"torch": {"exp_avg", "exp_avg_sq"}, "keras": {"momentum", "velocity"}}


@dataclasses.dataclass(frozen=True)
class Trip:
    """Result of resuming a checkpoint of `source` on `target`."""

    source: Ran
    target: Adapter
    world_size: int
    changed: tuple[str, ...]  # tensors whose bits differ after the trip
    state: Mapping[str, Any]  # entries of state.json that differ after the trip
    weights: float  # largest difference of the final weights from those of the uninterrupted run
    limit: float

    @property
    def is_good(self) -> bool:
        """Return whether nothing was lost."""
        return not self.changed and not self.state and self.weights <= self.limit

    def __str__(self) -> str:
        found = (
            f"{len(self.changed)} tensors changed {self.changed[:3]}, state {self.state}, weights {self.weights} away"
        )
        return f"{self.source} ({self.source.dtype}) -> {self.target} x {self.world_size}: {found}"


def travel(
    sources: Sequence[Ran],
    target: Adapter,
    world_size: int,
    directory: Path,
    references: References,
    run: Runner = run_python,
) -> list[Trip]:
    """Resume all checkpoints in one run of the target. Checkpoints are in float32 if the target does not support
    float64."""
    fitting = list(sources) if target.has_float64 else [source.in_float32 for source in sources]
    asked = {
        "model": target.model,
        "sources": [(str(number), source.dtype, str(source.source)) for number, source in enumerate(fitting)],
    }
    done = train(target, world_size, "targets.py", directory, [str(directory), json.dumps(asked)], run)
    assert done.returncode == 0, f"{target} x {world_size}: exit {done.returncode}\n{done.output[-3000:]}"
    outs = [directory / str(number) for number in range(len(fitting))]
    return [_trip(source, target, world_size, out, references) for source, out in zip(fitting, outs, strict=True)]


def _trip(source: Ran, target: Adapter, world_size: int, out: Path, references: References) -> Trip:
    (again,), (onward,) = (sorted((out / kind).rglob("step-*"))[-1:] for kind in ("again", "onward"))
    before, after = tensors(source.source), tensors(again)
    moments = MOMENTS[source.adapter.model]
    assert {name.rpartition(".")[2] for name in before} >= moments, f"{source}: no Adam moments in {source.source}"
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    old, new = _progress(source.source), _progress(again)
    state = {name: [old.get(name), new.get(name)] for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    whole = references.like(source).case("whole")
    rows = json.loads((onward / "state.json").read_text())["train"]["rows"]
    measured = [[row.get(str(name), math.inf) for name in whole.numbers["columns"]] for row in rows]
    apart = farthest({"metrics": measured}, {"metrics": whole.numbers["measured"]})
    weights = max(farthest(weights_of(onward), whole.weights), apart)
    return Trip(source, target, world_size, tuple(sorted(changed)), state, weights, limit_of(source, references))


def tensors(checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every tensor of model and optimizer, unsharded: element type, shape and bytes."""
    found = {}
    for part in ("model", "optimizer"):
        for name, tensor in read_tensors(checkpoint / part)[0].items():
            found[f"{part}/{name}"] = (tensor.dtype, tensor.shape, bytes(tensor.read()))
    return found


def _progress(checkpoint: Path) -> dict[str, Any]:
    """Return the position in the data, the state of the schedule, and the learning rate of each parameter group."""
    state = json.loads((checkpoint / "state.json").read_text())
    found = {name: state["train"][name] for name in ("step", "epoch", "samples_in_epoch", "samples_seen")}
    backend = state["backend"]
    return found | {"rates": _rates(backend["optimizer"]), "scheduler": backend["scheduler"]}


def _rates(optimizer: Mapping[str, Any]) -> list[Any]:
    """Return what determines the learning rates.

    For torch these are the rates of the parameter groups. For Keras they are the rate of the optimizer and its number
    of updates, from which a schedule computes the rate.
    """
    if "groups" in optimizer:
        return [group["options"]["lr"] for group in optimizer["groups"]]
    return [optimizer["learning_rate"], optimizer["iterations"]]


def table(trips: Iterable[Trip]) -> str:
    """Return a Markdown table with a row for each adapter that wrote and a column for each that read.

    A cell holds the largest difference over all numbers of processes, or "LOST" if something was lost.
    """
    cells: dict[tuple[str, str], list[Trip]] = {}
    for trip in trips:
        cells.setdefault((str(trip.source.adapter), str(trip.target)), []).append(trip)
    rows, columns = (list(dict.fromkeys(pair[axis] for pair in cells)) for axis in (0, 1))
    lines = [["from \\ to", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(_cell(cells.get((row, column), [])) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(trips: Sequence[Trip]) -> str:
    if not trips:
        return ""
    return f"{max(trip.weights for trip in trips):.0e}" if all(trip.is_good for trip in trips) else "LOST"
