"""Choose and sort runs by the values in their files: columns of the list, metrics, settings and hyperparameters."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.config.fields import in_words, rules
from distributed.config.settings import GROUPS, DistributedConfig, group_options
from distributed.errors import ConfigError, nearest
from distributed.metrics.direction import is_larger_better
from distributed.runs.listing import RunState
from distributed.runs.recorded import read_recorded

_COLUMNS: dict[str, Callable[[RunState], Any]] = {
    "name": lambda run: run.path.resolve().name,
    "status": lambda run: run.status,
    "backend": lambda run: run.backend or None,
    "num_nodes": lambda run: run.num_nodes,
    "world_size": lambda run: run.world_size or None,
    "step": lambda run: run.step,
    "epoch": lambda run: run.epoch,
    "restarts": lambda run: run.restarts,
    "samples_per_second": lambda run: run.samples_per_second,
    "age": lambda run: time.time() - run.began,
    "duration": lambda run: run.total_time,
}
_STARTED = "started"  # only for sorting
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIMES = ("age", "duration")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "==": operator.eq, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_FORM = re.compile(rf"\s*([^\s<>=!]+)\s*({'|'.join(_COMPARE)})\s*(.*?)\s*")


@dataclasses.dataclass(frozen=True)
class RunFilter:
    """A condition on runs, such as `val_loss<0.3`, `status=failed`, `name=digits-*` or `age>30d`."""

    text: str
    name: str
    operator: str
    value: str

    @classmethod
    def of(cls, text: str) -> RunFilter:
        """Return the condition that `text` states. Raises ConfigError if it has another form."""
        found = _FORM.fullmatch(text)
        if found is None or not found[3]:
            raise ConfigError(f"--where {text!r} has no NAME=VALUE form: write --where 'val_loss<0.3'")
        return cls(text, *found.groups())

    def holds(self, actual: Any) -> bool:
        """Return whether the value `actual` of a run fulfils the condition.

        A value that a run does not have, or that is not set, is equal to `null` and fulfils no other condition. Texts are compared
        as patterns with `*`, numbers as numbers. Raises ConfigError if the two cannot be compared.
        """
        compare = _COMPARE[self.operator]
        if self.value == "null" and compare in (operator.eq, operator.ne):
            return compare(actual, None)
        if actual is None:
            return False
        if isinstance(actual, (int, float)) and not isinstance(actual, bool):
            return compare(actual, self._number())
        if compare not in (operator.eq, operator.ne):
            raise ConfigError(f"--where {self.text!r}: {self.name} is no number ({in_words(actual)}): compare it with = or !=")
        return fnmatch.fnmatchcase(in_words(actual), self.value) is (compare is operator.eq)

    def _number(self) -> float:
        found = re.fullmatch(r"(.*?)\s*(min|[shd]|)", self.value)
        assert found is not None  # the unit may be empty
        number, unit = found.groups()
        try:
            if unit and self.name not in _TIMES:
                raise ValueError
            return float(number) * _SECONDS[unit]
        except ValueError:
            form = "a number of seconds, or one like 90s, 15min, 3h or 7d" if self.name in _TIMES else "a number"
            raise ConfigError(f"--where {self.text!r}: {self.name} is compared with {form}, not {self.value!r}") from None


def select(runs: Sequence[RunState], conditions: Iterable[RunFilter]) -> list[RunState]:
    """Return the runs that fulfil all `conditions`. Raises ConfigError if a condition names nothing that a run has."""
    chosen = list(runs)
    for condition in conditions:
        values = values_of(runs, condition.name, f"--where {condition.text!r}")
        chosen = [run for run in chosen if condition.holds(values[id(run)])]
    return chosen


def in_order(runs: Sequence[RunState], name: str = _STARTED, is_reversed: bool = False) -> list[RunState]:
    """Return the runs sorted by `name`, the newest, best or smallest first. Runs without a value always come last.

    Raises ConfigError if `name` is nothing that a run has.
    """
    if name == _STARTED:
        values: dict[int, Any] = {id(run): run.began for run in runs}
    else:
        values = values_of(runs, name, f"--sort {name}")
    is_falling = name == _STARTED or (name not in _COLUMNS and is_larger_better(name) is True)
    having = [run for run in runs if _is_sortable(values[id(run)])]
    is_text = any(isinstance(values[id(run)], str) for run in having)
    having.sort(key=lambda run: in_words(values[id(run)]) if is_text else values[id(run)], reverse=is_falling is not is_reversed)
    return having + [run for run in runs if not _is_sortable(values[id(run)])]


def _is_sortable(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value))


def values_of(runs: Sequence[RunState], name: str, where: str) -> dict[int, Any]:
    """Return the value of `name` in each run by the `id` of the run, None if the run does not have it.

    `name` is a column of the list, else a metric (its best value), a setting or hyperparameter, or a value of the last row. Raises
    ConfigError if no run has it and it is not a setting. The message then begins with `where`, the option that has `name`.
    """
    if name in _COLUMNS:
        return {id(run): _COLUMNS[name](run) for run in runs}
    values = {id(run): _value(run, name) for run in runs}
    if runs and name not in _settings() and all(value is None for value in values.values()):
        known = [*_COLUMNS, *_settings(), *(metric for run in runs for metric in (*run.best, *run.final))]
        raise ConfigError(f"{where}: no run here has {name!r}{nearest(name, known)}: name a column, metric or setting")
    return values


def _value(run: RunState, name: str) -> Any:
    if name in run.best:
        return run.best[name]
    recorded = read_recorded(run.path / "config.yaml")
    for values in (recorded, recorded.get("hyperparameters") or {}, run.final):
        if (value := _dotted(values, name)) is not None:
            return value
    return None


def _dotted(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of `name` or, for GROUP.OPTION, of the option in its option group."""
    group, dot, option = name.partition(".")
    if name not in values and dot and isinstance(values.get(group), Mapping):
        return values[group].get(option)
    return values.get(name)


def _settings() -> list[str]:
    options = [f"{group}.{option}" for group in GROUPS for option in rules(group_options(group))]
    return [*rules(DistributedConfig), *options]
