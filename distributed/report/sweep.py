"""The plots of a sweep: every trial, all parameters together, and the importance of each."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.config.json_lines import Memory
from distributed.config.kinds import COUNT, OBJECT, SHORT_TEXT, check_kinds, list_of, optional
from distributed.config.reading import MAX_JSON_BYTES, LimitError, parse_json, read_bytes
from distributed.errors import ConfigError
from distributed.report.curves import points, short
from distributed.report.panels import Line, Panel
from distributed.report.runs import read_run

FILE = "sweep.json"
_TRIAL = {
    "config": OBJECT, "metrics": optional(OBJECT), "status": SHORT_TEXT, "epochs": optional(COUNT), "run_dir": optional(SHORT_TEXT),
}  # fmt: skip
_MAX_TRIALS, _MAX_PARAMETERS = 50_000, 500  # of a sweep
_MAX_VALUES = 500_000  # parameters times trials
_LONGEST_NAME = 200  # letters of a parameter
_VALUE_BYTES, _VALUE_LETTERS = 16 << 10, 1000  # of memory of a value; a larger one is cut
_NUM_TREES = 100
_MIN_TRIALS = 8  # with fewer trials a random forest is meaningless
# Trials from which a forest learns, and parameters: it tries each of them on each trial.
_MAX_LEARNED, _MAX_RANKED = 2000, 50
_MAX_CURVES = 60
_HUGE = 1e300  # numbers from here on are treated as words, because their differences may be infinite
_FEW = 5  # up to this number of values, all values of a parameter are written beside its axis


@dataclasses.dataclass(frozen=True)
class TrialData:
    """One trial. `value` is the sweep's metric, NaN if the trial reported none."""

    id: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]
    value: float
    status: str
    epochs: int | None
    run_dir: Path | None


@dataclasses.dataclass(frozen=True)
class SweepData:
    """The content of a sweep.json."""

    path: Path
    metric: str
    mode: str
    trials: Sequence[TrialData]

    @property
    def done(self) -> list[TrialData]:
        """Trials with a value, the best first."""
        sign = -1.0 if self.mode == "max" else 1.0
        return sorted(
            (trial for trial in self.trials if math.isfinite(trial.value)), key=lambda trial: sign * trial.value
        )

    @functools.cached_property
    def varied(self) -> list[str]:
        """Parameters that are not the same in all trials."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.config)
        return [name for name in names if len({repr(trial.config.get(name)) for trial in self.trials}) > 1]


def read_sweep(directory: Path) -> SweepData:
    """Return the sweep in `directory`. Raises ConfigError if its file cannot be read or lists no trials."""
    path = directory / FILE
    try:
        content = parse_json(read_bytes(path, MAX_JSON_BYTES))
        check_kinds(content, {"metric": SHORT_TEXT, "mode": SHORT_TEXT, "trials": list_of(OBJECT)})
        trials = [_trial(each, content["metric"], directory) for each in content["trials"]]
        _check_parameters(trials)
        sweep = SweepData(directory, str(content["metric"]), str(content.get("mode", "min")), trials)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error.strerror}): check its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(path)!r} does not have the form in which a sweep writes it ({error}): name another directory"
        ) from None
    if not trials:
        raise ConfigError(f"sweep {str(directory)!r} has no trials yet: wait for the first one")
    return sweep


def _trial(content: Mapping[str, Any], metric: str, directory: Path) -> TrialData:
    check_kinds(content, _TRIAL)
    _check_num_parameters(content["config"])
    metrics = content.get("metrics") or {}
    value = metrics.get(metric)
    run_dir = content.get("run_dir")
    return TrialData(
        id=str(content["id"])[:_VALUE_LETTERS], config={name: _short_value(each) for name, each in content["config"].items()}, metrics=metrics,
        value=float(value) if isinstance(value, (int, float)) else math.nan,
        status=str(content.get("status", "")), epochs=content.get("epochs"),
        run_dir=directory / run_dir if run_dir else None,
    )  # fmt: skip


def _short_value(value: Any) -> Any:
    """Return the value of a parameter, or its begin as a text if it is large."""
    if isinstance(value, str):
        return value[:_VALUE_LETTERS]
    try:
        return Memory(_VALUE_BYTES).take(value)
    except LimitError:
        return reprlib.repr(value)


def _check_num_parameters(parameters: Collection[str]) -> None:
    if len(parameters) > _MAX_PARAMETERS:
        raise LimitError(f"has {len(parameters)} parameters, {_MAX_PARAMETERS} are allowed")


def _check_parameters(trials: Sequence[TrialData]) -> None:
    """Raise LimitError if the page of a sweep would become too large."""
    if len(trials) > _MAX_TRIALS:
        raise LimitError(f"has {len(trials)} trials, {_MAX_TRIALS} are allowed")
    names = {name for trial in trials for name in trial.config}
    if (longest := max(map(len, names), default=0)) > _LONGEST_NAME:
        raise LimitError(f"has a parameter whose name has {longest} letters, {_LONGEST_NAME} are allowed")
    _check_num_parameters(names)
    if len(names) * len(trials) > _MAX_VALUES:
        raise LimitError(f"has {len(names)} parameters in {len(trials)} trials, {_MAX_VALUES} values are allowed")


def sweep_panels(sweep: SweepData) -> list[Panel]:
    """Return the panels of a sweep: trials in order, their curves, parallel coordinates, importance."""
    panels = [_trials(sweep), _curves(sweep), _parallel(sweep), _importance(sweep)]
    return [dataclasses.replace(panel, heading="Sweep") for panel in panels if panel.lines or panel.more]


def _trials(sweep: SweepData) -> Panel:
    """Return the panel of each trial's metric in the order of the sweep, and of the best so far."""
    found = [(number, trial) for number, trial in enumerate(sweep.trials, 1) if math.isfinite(trial.value)]
    numbers = [number for number, _ in found]
    better = max if sweep.mode == "max" else min
    best: list[float] = []
    for _, trial in found:
        best.append(better(best[-1], trial.value) if best else trial.value)
    data: dict[str, Sequence[Any]] = {
        "x": numbers,
        "y": [short(trial.value) for _, trial in found],
        "text": [trial.id for _, trial in found],
    }
    lines = [
        Line("trial", 0, data, has_points=True, label="", is_faint=True),
        Line(
            "best so far",
            1,
            {"x": numbers, "y": [short(value) for value in best]},
            label=f"{best[-1]:.4g}" if best else "",
        ),
    ]
    lost = len(sweep.trials) - len(found)
    caption = f"{lost} trial{'s' * (lost > 1)} reported no {sweep.metric}" if lost else ""
    more = {"is_whole": True, "points_only": "trial"}
    return Panel(
        "lines", "Trials", sweep.metric, "trial", caption, lines=lines if found else (), more=more if found else {}
    )


def _curves(sweep: SweepData) -> Panel:
    """Return the panel of the metric over the steps, for trials with a run directory. The best one is coloured."""
    lines = []
    for index, trial in reversed(list(enumerate(sweep.done[:_MAX_CURVES]))):
        data = _curve(sweep.metric, trial)
        if data is not None:
            name = "best trial" if index == 0 else "other trials"
            text = f"{trial.id}, {sweep.metric} {trial.value:.4g}"
            lines.append(Line(
                name, 1 if index == 0 else -1, {**data, "text": [text] * len(data["y"])}, is_faint=index > 0,
                label=trial.id if index == 0 else "", has_points=len(data["y"]) < 3,
            ))  # fmt: skip
    caption = f"the {_MAX_CURVES} best of {len(sweep.done)}" if len(sweep.done) > _MAX_CURVES else ""
    return Panel("lines", "Curves of the trials", sweep.metric, lines=lines, caption=caption)


def _curve(metric: str, trial: TrialData) -> dict[str, list[float | None]] | None:
    if trial.run_dir is None:
        return None
    try:
        run = read_run(trial.run_dir)
    # The run was removed, ended before its first log line, or has a name that no file can have.
    except (ConfigError, OSError):
        return None
    is_val = metric.startswith("val_")
    data = points(run.val if is_val else run.train, metric.removeprefix("val_") if is_val else metric)
    return data if data["y"] else None


# ------------------------------------------------------------------ parallel coordinates


def _parallel(sweep: SweepData) -> Panel:
    """Return the panel with one line per trial through one axis per parameter. The colour is the metric."""
    trials = sweep.done
    if not trials or not sweep.varied:
        return Panel("parallel", "Parameters")
    axes = [_axis(name, [trial.config.get(name) for trial in trials]) for name in sweep.varied]
    axes.append(_axis(sweep.metric, [trial.value for trial in trials]))
    heights = list(zip(*(axis.pop("heights") for axis in axes), strict=True))
    values = [trial.value for trial in trials]
    lines = [
        {
            "y": list(height),
            "value": short(trial.value),
            "text": f"{trial.id}: {_config_text(trial.config, sweep.varied)}",
        }
        for trial, height in zip(trials, heights, strict=True)
    ]
    # The worst trials of a sweep are often outliers, so the colour follows the rank of the metric.
    more = {"axes": axes, "trials": lines, "metric": sweep.metric, "best": short(values[0]), "worst": short(values[-1])}
    caption = f"one line per trial; colour: {sweep.metric} by rank, the best is thick"
    return Panel("parallel", "Parameters", caption=caption, is_wide=True, more=more)


def _axis(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return where each value lies on the axis, from 0 to 1, and the labels of the axis."""
    # If a value is not a number, all values are treated as words.
    numbers = [value for value in values if _is_finite(value)]
    if len(numbers) < len(values) or len(set(numbers)) <= 1:
        words = sorted({str(value) for value in values})
        places = {word: _between(number, 0, len(words) - 1) for number, word in enumerate(words)}
        return {
            "name": name,
            "heights": [places[str(value)] for value in values],
            "ticks": [(place, word) for word, place in places.items()],
        }
    low, high = min(numbers), max(numbers)
    if is_log := low > 0 and high / low > 30:
        low, high = math.log10(low), math.log10(high)
    scaled = [math.log10(number) if is_log else number for number in numbers]
    if len(set(numbers)) <= _FEW:
        ticks = sorted(
            {(_between(each, low, high), f"{number:g}") for each, number in zip(scaled, numbers, strict=True)}
        )
        return {"name": name, "heights": [_between(each, low, high) for each in scaled], "ticks": ticks}
    ends = [low + (high - low) * part / 4 for part in range(5)]
    ticks = [(part / 4, f"{10**end if is_log else end:.3g}") for part, end in enumerate(ends)]
    return {"name": name, "heights": [_between(each, low, high) for each in scaled], "ticks": ticks}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE


def _between(value: float, low: float, high: float) -> float:
    return 0.5 if high == low else round((value - low) / (high - low), 6)


def _config_text(config: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_value_text(config.get(name))}" for name in names)


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------ importance


def _importance(sweep: SweepData) -> Panel:
    """Return the panel of each parameter's permutation importance under a random forest that predicts the metric."""
    names, done = sweep.varied, sweep.done
    trials = done[:: math.ceil(len(done) / _MAX_LEARNED) or 1]
    title = "Importance of the parameters"
    if len(names) < 2:
        return Panel("bars", title)
    if len(trials) < _MIN_TRIALS:
        return Panel(
            "bars",
            title,
            caption=f"needs {_MIN_TRIALS} finished trials, and there are {len(trials)}",
            more={"rows": []},
        )
    if len(names) > _MAX_RANKED:
        return Panel(
            "bars",
            title,
            caption=f"needs {_MAX_RANKED} parameters or fewer, and there are {len(names)}",
            more={"rows": []},
        )
    try:
        shares = _importances(names, trials)
    except ImportError:
        caption = "needs scikit-learn: pip install 'distributed-trainer[report]'"
        return Panel("bars", title, caption=caption, more={"rows": []})
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    line = Line(
        "importance",
        0,
        {"x": [short(value) for _, value in ordered], "y": [name for name, _ in ordered]},
        in_legend=False,
    )
    caption = (
        f"how much worse a random forest over {len(trials)} trials predicts {sweep.metric} when one parameter is shuffled, as a"
        " share of the total"
    )
    return Panel("bars", title, x="share", lines=[line], caption=caption, more={"rows": [name for name, _ in ordered]})


def _importances(names: Sequence[str], trials: Sequence[TrialData]) -> dict[str, float]:
    """Return the importance of each parameter. They sum to 1, or are all 0 if no parameter matters."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    table = [_axis(name, [trial.config.get(name) for trial in trials])["heights"] for name in names]
    inputs = [list(row) for row in zip(*table, strict=True)]
    order = sorted(range(len(trials)), key=lambda each: trials[each].value)
    ranks = [0.0] * len(trials)
    # Use the rank of a trial instead of its value, because a diverged trial would outweigh all others.
    for rank, each in enumerate(order):
        ranks[each] = float(rank)
    forest = RandomForestRegressor(_NUM_TREES, random_state=0).fit(inputs, ranks)
    drops = permutation_importance(forest, inputs, ranks, n_repeats=10, random_state=0).importances_mean
    drops = [max(float(drop), 0.0) for drop in drops]
    total = sum(drops) or 1.0
    return {name: drop / total for name, drop in zip(names, drops, strict=True)}
