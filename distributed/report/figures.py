"""Figures of runs and the settings in which runs differ, for tables on a page and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.loggers.wording import duration
from distributed.report.curves import readable
from distributed.report.panels import mean_times
from distributed.report.runs import RunData

_DIRECTORIES = ("checkpoint_dir", "tensorboard_dir", "run_dir")


def figures(run: RunData) -> dict[str, str]:
    """Return the known figures of a run by name: backend, steps, times, throughput and best metrics."""
    result = run.result
    records = (*run.train, *run.val)
    step = max([record["step"] for record in records] + [result.get("steps") or 0])
    total = result.get("total_time") if run.status != "running" else max(record["time"] for record in records)
    shares = mean_times(run)
    step_s = sum(shares.values())
    values = {
        "backend": run.backend, "processes": _processes(run), "global batch": str(run.settings.get("global_batch_size") or ""),
        "steps": f"{step:,}", "epochs": str(result.get("epochs", "")), "time": duration(total) if total else "",
        "samples per second": f"{run.samples_per_second:,.0f}" if run.samples_per_second else "",
        "time per step": f"{readable(1e3 * step_s)} ms" if step_s else "",
    }  # fmt: skip
    best = {f"best {name}": number_text(value) for name, value in metrics_of(run, "best_metrics").items()}
    values["waiting for data"] = f"{shares['data_s'] / step_s if step_s else 0.0:.0%}" if run.times else ""
    values["restarts"] = str(sum(event["event"] == "restarted" for event in run.events))
    return {name: value for name, value in (values | best).items() if value}


def metrics_of(run: RunData, which: str) -> Mapping[str, Any]:
    """Return the `best_metrics` or `final_metrics` of a run, without the entries that are not metrics."""
    hidden = ("epoch", "step", "grad_norm", "samples_per_second", "learning_rate", "validations")
    return {name: value for name, value in (run.result.get(which) or {}).items() if name not in hidden}


def _processes(run: RunData) -> str:
    on_nodes = f" on {run.num_nodes} nodes" if run.num_nodes > 1 else ""
    return f"{run.world_size}{on_nodes}" if run.world_size else ""


def differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return the value of each run for each setting or hyperparameter that is not the same in all runs.

    Directories are left out. None stands for a value that is not set or that a run does not have.
    """
    every = [{**run.settings, **run.hyperparameters, "script": run.script} for run in runs]
    names = [name for name in dict.fromkeys(name for each in every for name in each) if name not in _DIRECTORIES]
    found = {name: [each.get(name) for each in every] for name in names}
    return {name: values for name, values in found.items() if len(set(map(value_text, values))) > 1}


def number_text(value: Any) -> str:
    """Return a metric as text; the files store NaN and infinite values as null."""
    return readable(value) if isinstance(value, (int, float)) else "not finite" if value is None else str(value)


def value_text(value: Any, form: str = "") -> str:
    """Return a setting as text. `form` is the format of floats; by default they have all their digits."""
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:{form}}"
    return json.dumps(value, default=str, skipkeys=True) if isinstance(value, (dict, list)) else str(value)
