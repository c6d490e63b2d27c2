"""`distributed compare`: show several runs side by side in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distributed.cli.run_argument import run_paths
from distributed.config.addresses import refuse_address
from distributed.errors import ConfigError, nearest, shown
from distributed.loggers.wording import middle_cut, number
from distributed.metrics.direction import is_larger_better
from distributed.report.figures import differences, figures, metrics_of, value_text
from distributed.report.panels import mean_times
from distributed.report.runs import POSITION, RunData, read_runs
from distributed.report.sparkline import ASCII, BLOCKS, Curve, range_of, sparkline

_WIDTH = 80
_FIRST = 26  # widest column of names
_NARROWEST = 12
_MONITOR = "val_loss"


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="two or more run directories", callback=run_paths)
    ],
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="draw the curve of this metric (default: the monitor of the first run)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON object")] = False,
) -> None:
    """Compare runs: results, settings that differ, and the curve of a metric.

    A run may still be going on, or may have been killed. A * marks the best value of a metric. 'report --compare' draws the curves of
    all metrics into an HTML file.
    """
    for run in runs:
        refuse_address(run, "'distributed compare'")
    if len(runs) < 2:
        raise ConfigError("compare needs two or more runs: name another one")
    found = read_runs(runs)
    name = _metric(found, metric)
    if as_json:
        print(json.dumps(_plain(found, name), indent=1, default=str, skipkeys=True))
        return
    for line in _lines(found, name):
        print(shown(line))


def _metric(runs: Sequence[RunData], given: str | None) -> str:
    """Return the metric whose curve is drawn. Raises ConfigError if `given` is in no run."""
    known = dict.fromkeys(name for run in runs for name in _names(run))
    if given is not None and given not in known:
        raise ConfigError(f"--metric {given}: no run has it{nearest(given, known)}: choose one of {', '.join(known)}")
    monitor = str(runs[0].settings.get("monitor") or _MONITOR)
    return given or (monitor if monitor in known else "loss" if "loss" in known else next(iter(known)))


def _names(run: RunData) -> Iterator[str]:
    for prefix, records in (("val_", run.val), ("", run.train)):
        yield from (prefix + name for record in records for name in record if name not in POSITION)


def _curve(run: RunData, metric: str) -> Curve:
    records, name = (run.val, metric[len("val_") :]) if metric.startswith("val_") else (run.train, metric)
    return [(record["step"], record[name]) for record in records if name in record]


def _plain(runs: Sequence[RunData], metric: str) -> dict[str, Any]:
    return {
        "runs": [
            {
                "run": str(run.path), "status": run.status, "backend": run.backend, "world_size": run.world_size,
                "steps": run.result.get("steps"), "total_time": run.result.get("total_time"),
                "samples_per_second": run.samples_per_second or None, "step_s": sum(mean_times(run).values()) or None,
                "best_metrics": metrics_of(run, "best_metrics"), "final_metrics": metrics_of(run, "final_metrics"),
                "curve": _curve(run, metric),
            }
            for run in runs
        ],
        "settings": differences(runs), "metric": metric,
    }  # fmt: skip


def _lines(runs: Sequence[RunData], metric: str) -> Iterator[str]:
    """Yield the lines. Runs are named by letters, as many in one table as fit."""
    letters = [_letter(position) for position in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        yield f"{letter}  {middle_cut(str(run.path), _WIDTH - 2 - len(letter))}"
    at_once = (_WIDTH - _FIRST) // _NARROWEST
    results, settings = _results(runs), _settings(runs)
    for begin in range(0, len(runs), at_once):
        part = slice(begin, begin + at_once)
        yield ""
        yield from _table("", letters[part], {name: values[part] for name, values in results.items()})
        if any(value.endswith("*") for values in results.values() for value in values[part]):
            yield "* the best value"
        if settings:
            yield ""
            yield from _table("settings", letters[part], {name: values[part] for name, values in settings.items()})
    if not settings:
        yield from ("", "no setting differs")
    yield ""
    yield from _curves(runs, letters, metric)


def _letter(position: int) -> str:
    """Return A to Z, then A1 to Z1 and so on."""
    turn, letter = divmod(position, 26)
    return chr(ord("A") + letter) + (str(turn) if turn else "")


def _results(runs: Sequence[RunData]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    every = [{"status": run.status, **figures(run)} for run in runs]
    for name in dict.fromkeys(name for each in every for name in each if not name.startswith("best ")):
        rows[name] = [each.get(name, "") for each in every]
    for which in ("best", "final"):
        metrics = [metrics_of(run, f"{which}_metrics") for run in runs]
        for name in dict.fromkeys(name for each in metrics for name in each):
            rows[f"{which} {name}"] = _marked(name, [each.get(name) for each in metrics])
    return rows


def _marked(name: str, values: Sequence[float | None]) -> list[str]:
    """Return values of a metric as texts. The best one gets a *, if it is known which that is and not all are equal."""
    finite, is_larger = [value for value in values if value is not None], is_larger_better(name)
    best = None
    if is_larger is not None and len(set(finite)) > 1:
        best = max(finite) if is_larger else min(finite)
    return ["" if value is None else number(value) + "*" * (value == best) for value in values]


def _settings(runs: Sequence[RunData]) -> dict[str, list[str]]:
    return {name: [value_text(value) for value in values] for name, values in differences(runs).items()}


def _table(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    first = min(max(map(len, (title, *rows))), _FIRST)
    room = (_WIDTH - first) // len(heads) - 2
    cut = {name: [middle_cut(value, room) for value in values] for name, values in rows.items()}
    widths = [max(map(len, column)) for column in zip(heads, *cut.values(), strict=True)]
    for name, values in ((title, heads), *cut.items()):
        cells = [value.ljust(width) for value, width in zip(values, widths, strict=True)]
        yield "  ".join([middle_cut(name, first).ljust(first), *cells]).rstrip()


def _curves(runs: Sequence[RunData], letters: Sequence[str], metric: str) -> Iterator[str]:
    curves = [_curve(run, metric) for run in runs]
    if not any(curves):
        return
    steps, values = range_of(curves)
    bounds = f"between {number(values[0])} and {number(values[1])}"
    yield f"{metric}, {bounds}, in steps {steps[0]:g} to {steps[1]:g}"
    ends = ["none" if not curve else _end(curve[-1][1]) for curve in curves]
    letter_width, end_width = max(map(len, letters)), max(map(len, ends))
    width = _WIDTH - letter_width - end_width - 4
    for letter, curve, end in zip(letters, curves, ends, strict=True):
        line = sparkline(curve, steps, values, width, _marks())
        yield f"{letter:<{letter_width}}  {line:<{width}}  {end:>{end_width}}"


def _end(value: float | None) -> str:
    return "not finite" if value is None else number(float(value))


def _marks() -> str:
    """Return the characters of a sparkline that the output can show."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS
