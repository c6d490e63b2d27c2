"""The pages of one run, several runs and a sweep: the text and tables around the plots."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.report.figures import differences, figures, number_text, value_text
from distributed.report.gallery import logged_sections
from distributed.report.page import Section, escape, facts, folded, page, table
from distributed.report.panels import EVENTS, run_panels
from distributed.report.runs import RunData
from distributed.report.sweep import SweepData, TrialData, sweep_panels

_FIT = {"finished": "good", "failed": "bad", "interrupted": "bad"}
_SHORT = ".4g"
_MOST_EVENTS, _MOST_TEXT = 2000, 2000  # events in the table, and characters of one


def run_page(run: RunData) -> str:
    """Return the page of one run."""
    return page(
        run.label, _under(run), [Section("", _summary(run))], run_panels([run]),
        [*logged_sections(run), Section("Settings", _settings(run)), Section("What happened", _journal(run))], _longest([run]),
    )  # fmt: skip


def compare_page(runs: Sequence[RunData]) -> str:
    """Return the page of several runs side by side."""
    return page(
        f"{len(runs)} runs", _written(), [Section("Results", _results(runs)), Section("Settings that differ", _differences(runs))],
        run_panels(runs), [], _longest(runs),
    )  # fmt: skip


def sweep_page(sweep: SweepData) -> str:
    """Return the page of a sweep."""
    return page(
        f"Sweep {sweep.path.resolve().name}", f"{sweep.metric}, {sweep.mode} is best; {_written()}",
        [Section("", _sweep_facts(sweep))], sweep_panels(sweep), [Section("Trials, the best first", _trials(sweep))], 0.0,
    )  # fmt: skip


def _written() -> str:
    return f"written {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"


def _longest(runs: Sequence[RunData]) -> float:
    return max(float(record["time"]) for run in runs for record in (*run.train, *run.val, *run.events))


# ------------------------------------------------------------------ one run


def _under(run: RunData) -> str:
    what = f"{run.script}, " if run.script else ""
    return f"{what}{run.path}; {_written()}"


def _summary(run: RunData) -> str:
    values = {"status": run.status, **figures(run)}
    text = facts(values, {"status": _FIT.get(run.status, "")})
    if error := run.result.get("error"):
        text += f'<p class="error">{escape(error)}</p>'
    return text


def _settings(run: RunData) -> str:
    """Return the tables of the given settings, of hyperparameters, and, folded, of settings at their defaults."""
    if not run.settings:
        return '<p class="caption">no config.yaml</p>'
    given = {name: value for name, value in run.settings.items() if name in run.sources}
    rest = {name: value for name, value in run.settings.items() if name not in run.sources}
    text = (
        table(("setting", "value", "from"), [(name, value_text(v), run.sources[name]) for name, v in given.items()])
        if given
        else ""
    )
    if run.hyperparameters:
        text += "<h3>Hyperparameters</h3>" + table(
            ("name", "value"), [(n, value_text(v)) for n, v in run.hyperparameters.items()]
        )
    return text + folded(
        f"{len(rest)} settings at their defaults",
        table(("setting", "value"), [(n, value_text(v)) for n, v in rest.items()]),
    )


def _journal(run: RunData) -> str:
    rows = [
        (
            clock(event["time"]),
            f"{event['step']:,}",
            EVENTS.get(event["event"], event["event"][:_MOST_TEXT]),
            _detail(event),
        )
        for event in run.events[-_MOST_EVENTS:]
    ]
    count = len(run.events)
    title = f"{count} events" if count <= _MOST_EVENTS else f"the newest {_MOST_EVENTS} of {count} events"
    return folded(title, table(("time", "step", "event", ""), rows))


def _detail(event: Mapping[str, Any]) -> str:
    hidden = ("time", "step", "event", "traceback", "batch_dependent")
    return ", ".join(f"{name} {value}" for name, value in event.items() if name not in hidden)[:_MOST_TEXT]


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: `0:07:05`."""
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


# ------------------------------------------------------------------ several runs


def _results(runs: Sequence[RunData]) -> str:
    values = [{"status": run.status, **figures(run)} for run in runs]
    heads = list(dict.fromkeys(name for each in values for name in each))
    rows = [(run.label, *(each.get(name, "") for name in heads)) for run, each in zip(runs, values, strict=True)]
    return table(("run", *heads), rows, colors=range(len(runs)), is_tight=True)


def _differences(runs: Sequence[RunData]) -> str:
    """Return a table with one row per setting or hyperparameter that is not the same in all runs."""
    rows = [(name, *map(value_text, values)) for name, values in differences(runs).items()]
    if not rows:
        return '<p class="caption">none: the runs have the same settings</p>'
    return table(("setting", *(run.label for run in runs)), rows)


# ------------------------------------------------------------------ a sweep


def _sweep_facts(sweep: SweepData) -> str:
    done = sweep.done
    states: dict[str, int] = {}
    for trial in sweep.trials:
        states[trial.status] = states.get(trial.status, 0) + 1
    values = {"trials": str(len(sweep.trials)), **{name: str(count) for name, count in states.items() if name}}
    if epochs := sum(trial.epochs or 0 for trial in sweep.trials):
        values["epochs in all"] = f"{epochs:,}"
    if done:
        values[f"best {sweep.metric}"] = f"{done[0].value:.4g}"
        values["best trial"] = done[0].id
        values |= {name: value_text(done[0].config.get(name), _SHORT) for name in sweep.varied}
    return facts(values)


def _trials(sweep: SweepData) -> str:
    """Return the table of all trials. Those without a value come last."""
    order: list[TrialData] = [*sweep.done, *(trial for trial in sweep.trials if not math.isfinite(trial.value))]
    names = sweep.varied
    rows = [
        (trial.id, number_text(trial.value) if math.isfinite(trial.value) else "-", trial.status, trial.epochs or "",
         *(value_text(trial.config.get(name), _SHORT) for name in names))
        for trial in order
    ]  # fmt: skip
    return table(
        ("trial", sweep.metric, "status", "epochs", *names), rows, best=0 if sweep.done else None, is_tight=True
    )
