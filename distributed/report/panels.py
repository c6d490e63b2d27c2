"""The plots of runs as data, one panel per plot. `page.js` draws them."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.report.curves import columns, num_not_finite, points, readable, short, thinned
from distributed.report.runs import Record, RunData

Columns = Mapping[str, Sequence[Any]]

PARTS = {"data_s": "data", "compute_s": "compute", "communication_s": "communication", "checkpoint_s": "checkpoint"}
# Name in a log line -> (title, label of the axis).
_NAMED = {
    "loss": ("Loss", "loss"),
    "samples_per_second": ("Throughput", "samples per second"),
    "learning_rate": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm"),
}
_LAST = ("samples_per_second", "learning_rate", "grad_norm")  # shown after the metrics
# Event -> its name on the page. The events in BREAKS interrupt training and are marked in every plot.
BREAKS = {
    "worker_failed": "worker failed",
    "node_failed": "node failed",
    "node_lost": "node lost",
    "node_joined": "node joined",
    "restarted": "restarted",
    "regrouped": "number of processes changed",
    "resumed": "resumed",
    "preempted": "stopped by signal",
}
EVENTS = {
    "started": "started",
    "checkpoint_saved": "checkpoint",
    "slow_rank": "slow rank",
    **BREAKS,
    "not_started": "not started",
    "finished": "finished",
}
_MANY_RANKS = 8
_MANY_EVENTS = 1000  # limit of the events of one kind that are drawn
_MANY_MARKS = 200  # limit of the events that are marked in every plot
_MANY_ROWS = 200  # limit of the kinds of events, each with its node, that are drawn
_MANY_METRICS = 200  # limit of the metrics that are drawn
_MS = 1e3


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve, or the points of one kind. `data` has the columns `x` (or `step` and `time`) and `y`."""

    name: str  # in the legend; a click on it hides all lines of that name
    color: int  # number in the page's palette, -1: grey
    data: Columns
    label: str = ""  # shown in the legend beside the name
    is_dashed: bool = False
    has_points: bool = False
    is_faint: bool = False
    in_legend: bool = True


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. `x` is "run" for the page's own axis (step or time), or the label of the axis."""

    kind: str  # "lines", "areas", "bars", "events" or "parallel"
    title: str
    y: str = ""
    x: str = "run"
    caption: str = ""
    heading: str = ""  # the heading above the panel
    is_wide: bool = False
    lines: Sequence[Line] = ()
    marks: Sequence[Mapping[str, Any]] = ()  # vertical lines: step, time, text
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # data for this kind only


def run_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Return all panels about one run, or about several runs with their curves in the same plots."""
    metrics, others = _names(runs)
    cuts = _marks(runs[0]) if len(runs) == 1 else []
    panels = [_metric(runs, name, cuts) for name in metrics[:_MANY_METRICS]]
    if (more := len(metrics) - _MANY_METRICS) > 0:
        panels[-1] = _with_caption(panels[-1], f"{more} more metrics are not drawn")
    panels += [_events(runs)]
    panels += scaling_panels(runs)
    speed = [_metric(runs, name, cuts) for name in others if name == "samples_per_second"]
    speed += [_time_split(runs[0], cuts)] if len(runs) == 1 else [_time_bars(runs)]
    speed += [_ranks(runs[0], cuts)] if len(runs) == 1 else [_imbalance(runs)]
    panels += [dataclasses.replace(panel, heading="Speed") for panel in speed]
    optimizer = [_metric(runs, name, cuts) for name in others if name != "samples_per_second"]
    panels += [dataclasses.replace(panel, heading="Optimizer") for panel in optimizer]
    return [panel for panel in panels if panel.lines]


def _with_caption(panel: Panel, text: str) -> Panel:
    return dataclasses.replace(panel, caption="; ".join(filter(None, (panel.caption, text))))


def _names(runs: Sequence[RunData]) -> tuple[list[str], list[str]]:
    """Return (metrics with the loss first, other names that are drawn over the steps)."""
    names = dict.fromkeys(name for run in runs for records in run.by_name for name in records)
    metrics = [name for name in names if name not in _LAST]
    return sorted(metrics, key=lambda name: name != "loss"), [name for name in _LAST if name in names]


def _metric(runs: Sequence[RunData], name: str, marks: Sequence[Mapping[str, Any]]) -> Panel:
    """Return the panel of one name of the log lines, with training and validation on the same axes."""
    title, unit = _NAMED.get(name, (name[:1].upper() + name[1:].replace("_", " "), name))
    lines = []
    for number, run in enumerate(runs):
        for by_name, split in zip(run.by_name, ("train", "validation"), strict=True):
            records = by_name.get(name, ())
            data = points(records, name)
            if not data["y"]:
                continue
            is_val = split == "validation"
            is_alone = len(runs) == 1
            lines.append(Line(
                name=(split if name not in _LAST else run.label) if is_alone else run.label,
                color=int(is_val) if is_alone else number, data=data, label=_last(records, name),
                is_dashed=is_val and not is_alone, has_points=is_val or len(data["y"]) < 3,
                in_legend=(is_alone and name not in _LAST) or (not is_alone and not is_val),
            ))  # fmt: skip
    missing = sum(num_not_finite(by_name.get(name, ()), name) for run in runs for by_name in run.by_name)
    parts = [f"{missing} value{'s' * (missing > 1)} not finite (gaps)"] if missing else []
    if len(runs) > 1 and any(name in run.by_name[1] for run in runs):
        parts.append("solid: training, dashed: validation")
    return Panel("lines", title, unit, lines=lines, caption="; ".join(parts), marks=marks, heading="Training")


def _last(records: Sequence[Record], name: str) -> str:
    value = next((record[name] for record in reversed(records) if isinstance(record.get(name), (int, float))), None)
    return "" if value is None else readable(value)


# ------------------------------------------------------------------ events


def _marks(run: RunData) -> list[dict[str, Any]]:
    """Return the vertical lines at events that interrupted training."""
    found = [event for event in run.events if event["event"] in BREAKS]
    return [
        {"step": event["step"], "time": short(event["time"]), "text": EVENTS[event["event"]]}
        for event in _some(found, _MANY_MARKS)
    ]


def _some(events: Sequence[Record], most: int) -> Sequence[Record]:
    """Return up to `most` events in equal distances."""
    return events[:: math.ceil(len(events) / most) or 1]


def _events(runs: Sequence[RunData]) -> Panel:
    """Return the panel of events, with one line of marks per kind of event, or per run if there are several."""
    lines = []
    most = 0
    for number, run in enumerate(runs):
        kinds = _by_kind(run)
        most = max(most, len(kinds))
        for (kind, node), every in list(kinds.items())[:_MANY_ROWS]:
            text = EVENTS[kind] if node is None else f"node {node}: {EVENTS[kind].removeprefix('node ')}"
            found = _some(every, _MANY_EVENTS)
            data = columns(found, range(len(found)))
            row = text if len(runs) == 1 else run.label
            about = [_about(event) for event in found]
            color = list(EVENTS).index(kind) % 7 if len(runs) == 1 else number
            lines.append(Line(row, color, {**data, "text": about, "kind": [kind] * len(about)}))
    more = {"rows": list(dict.fromkeys(line.name for line in lines)), "kinds": EVENTS}
    caption = "" if len(runs) == 1 else "circles: checkpoints, crosses: failures, triangles: resumed"
    panel = Panel("events", "Events", lines=lines, heading="Training", is_wide=True, more=more, caption=caption)
    return _with_caption(panel, f"{most - _MANY_ROWS} more kinds are not drawn") if most > _MANY_ROWS else panel


def _by_kind(run: RunData) -> dict[tuple[str, int | str | None], list[Record]]:
    """Return the events of a run for each pair (kind, node).

    The node is a number, or a name on a cluster that does not number its nodes. It is None if an event belongs to no node.
    """
    found: dict[tuple[str, int | str | None], list[Record]] = {}
    for event in run.events:
        if event["event"] in EVENTS:
            found.setdefault((event["event"], event.get("node")), []).append(event)
    order = list(EVENTS)
    keys = sorted(found, key=lambda each: (order.index(each[0]), each[1] is not None, str(each[1]).rjust(9)))
    return {key: found[key] for key in keys}


def _about(event: Record) -> str:
    """Return the tooltip of an event: what happened, and why."""
    detail = event.get("cause") or event.get("checkpoint") or event.get("host") or ""
    if event["event"] == "started" and event.get("restart_count"):
        detail = f"attempt {event['restart_count'] + 1}"
    text = EVENTS[event["event"]]
    return f"{text}: {detail}"[:160] if detail else text


# ------------------------------------------------------------------ time


def _time_split(run: RunData, marks: Sequence[Mapping[str, Any]]) -> Panel:
    """Return the panel of the parts of an update's time, stacked."""
    names = [name for name in PARTS if any(record.get(name) for record in run.times)]
    positions = thinned([record.get("step_s") for record in run.times])
    shares = mean_times(run)
    total = sum(shares.values())
    lines = [
        Line(
            PARTS[name],
            list(PARTS).index(name),
            columns(run.times, positions, name, _MS),
            label=f"{shares[name] / total:.1%}",
        )
        for name in names
        if total
    ]
    return Panel("areas", "Time of an update", "ms per update", lines=lines, marks=marks)


def mean_times(run: RunData) -> dict[str, float]:
    """Return the seconds of an update by part, averaged over the updates of the run."""
    weights = []
    before = min((int(event["step"]) for event in run.events if event["event"] == "started"), default=0)
    for record in run.times:
        weights.append(max(int(record["step"]) - before, 0) or 1)
        before = int(record["step"])
    total = sum(weights) or 1
    return {
        name: sum(weight * (record.get(name) or 0.0) for weight, record in zip(weights, run.times, strict=True)) / total
        for name in PARTS
    }


def _time_bars(runs: Sequence[RunData]) -> Panel:
    """Return the panel of the mean times of each run, with one bar per run."""
    having = [run for run in runs if run.times]
    means = [mean_times(run) for run in having]
    labels = [run.label for run in having]
    lines = [
        Line(text, number, {"x": [short(1e3 * mean[name]) for mean in means], "y": labels})
        for number, (name, text) in enumerate(PARTS.items())
        if any(mean[name] for mean in means)
    ]
    return Panel("bars", "Time of an update", x="ms per update, mean of the run", lines=lines, more={"rows": labels})


def rank_names(run: RunData) -> list[str]:
    """Return the names `rank_0_s`, `rank_1_s`, ... in the order of ranks."""
    seen = dict.fromkeys(name for record in run.times for name in record)
    return sorted((name for name in seen if re.fullmatch(r"rank_\d{1,9}_s", name)), key=lambda name: (len(name), name))


def rank_means(run: RunData) -> dict[str, float]:
    """Return the seconds per update of each rank, without the time it waited for others, the slowest rank first."""
    values: dict[str, list[float]] = {name: [] for name in rank_names(run)}
    for record in run.times:
        for name in record.keys() & values.keys():
            values[name].append(record[name])
    means = {name: statistics.fmean(each) for name, each in values.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _ranks(run: RunData, marks: Sequence[Mapping[str, Any]]) -> Panel:
    """Return the panel of each rank's time. With many ranks it shows the slowest ones and the median of all."""
    means = rank_means(run)
    if len(means) < 2:
        return Panel("lines", "Time of each rank")
    names = rank_names(run) if len(means) <= _MANY_RANKS else list(means)[:3]
    lines = [
        Line(_rank(run, name), number, points(run.times, name, _MS), label=f"{1e3 * means[name]:.3g} ms")
        for number, name in enumerate(names)
    ]
    if len(means) > _MANY_RANKS:
        middle = [
            {
                **_position(record),
                "median": statistics.median_low([record[name] for name in record.keys() & means.keys()] or [math.nan]),
            }
            for record in run.times
        ]
        lines.append(Line(f"median of {len(means)} ranks", -1, points(middle, "median", _MS), is_dashed=True))
    slowest, ratio = next(iter(means)), _imbalance_of(means)
    behind = f"{ratio:.2f} x the {'other' if len(means) == 2 else 'median of the others'}"
    caption = f"data and compute, without waiting for others; slowest: {_rank(run, slowest)}, {behind}"
    return Panel("lines", "Time of each rank", "ms per update", lines=lines, caption=caption, marks=marks)


def _position(record: Record) -> Record:
    return {"step": record["step"], "time": record["time"]}


def _rank(run: RunData, name: str) -> str:
    """Return the label of a name such as `rank_3_s`: the rank and, if there are several nodes of one size, its node."""
    rank = int(name[len("rank_") : -len("_s")])
    per_node, rest = divmod(run.world_size, run.num_nodes)
    return f"rank {rank}, node {rank // per_node}" if run.num_nodes > 1 and per_node and not rest else f"rank {rank}"


def _imbalance_of(values: Mapping[str, float]) -> float:
    """Return the time of the slowest rank divided by the median of the others."""
    *others, slowest = sorted(values.values())
    middle = statistics.median(others) if others else 0.0
    return slowest / middle if middle else math.nan


def _imbalance(runs: Sequence[RunData]) -> Panel:
    """Return the panel of how far the slowest rank is behind, for each run of several processes."""
    lines = []
    for number, run in enumerate(runs):
        names = set(rank_names(run))
        if len(names) < 2:
            continue
        records = [
            {**_position(record), "ratio": _imbalance_of({name: record[name] for name in here})}
            for record in run.times
            if (here := record.keys() & names)
        ]
        lines.append(Line(run.label, number, points(records, "ratio"), label=f"{_imbalance_of(rank_means(run)):.2f}"))
    caption = "1: all ranks need the same time for data and compute"
    return Panel("lines", "Slowest rank", "times the median of the others", lines=lines, caption=caption)


# ------------------------------------------------------------------ scaling


def scaling_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Return panels of throughput and efficiency over the number of processes, for backends that ran with more than one."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.world_size and run.samples_per_second:
            rates = found.setdefault(run.backend, {})
            rates[run.world_size] = max(run.samples_per_second, rates.get(run.world_size, 0.0))
    found = {backend: dict(sorted(rates.items())) for backend, rates in found.items() if len(rates) > 1}
    if not found:
        return []
    caption = "measured over each whole run; the fastest of several runs is shown"
    speed, efficiency = [], []
    for number, (backend, rates) in enumerate(found.items()):
        worlds = list(rates)
        per_process = rates[worlds[0]] / worlds[0]
        ideal = [short(per_process * world) for world in worlds]
        shares = [rates[world] / (per_process * world) for world in worlds]
        speed += [
            Line(backend, number, {"x": worlds, "y": [short(rate) for rate in rates.values()]}, has_points=True),
            Line("linear" if len(found) == 1 else f"{backend}, linear", -1, {"x": worlds, "y": ideal}, is_dashed=True),
        ]
        efficiency.append(Line(
            backend, number, {"x": worlds, "y": [short(100 * share) for share in shares]}, has_points=True,
            label=f"{shares[-1]:.0%} on {worlds[-1]}",
        ))  # fmt: skip
    base = "the smallest number of processes is 100 %"
    return [
        Panel("lines", "Scaling", "samples per second", "processes", caption, "Scaling", lines=speed, more=_WHOLE),
        Panel(
            "lines",
            "Efficiency",
            "% of linear",
            "processes",
            base,
            "Scaling",
            lines=efficiency,
            more=_WHOLE | {"from": 0},
        ),
    ]


_WHOLE = {"is_whole": True}  # the axis has integers only
