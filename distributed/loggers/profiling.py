"""Profile a few updates of a run on every rank: wait, warm up, record, and show what costs most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distributed.callbacks import Callback
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.loggers.base import LoggedFit
    from distributed.state import StepResult, TrainState

_COSTLIEST = 5
_SCHEDULE = ("profile_wait", "profile_warmup", "profile_active")


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the recorded updates of one rank show."""

    seconds: float  # from the first to the last update
    # operator -> (seconds without those in the operators that it calls, number of calls)
    operators: Mapping[str, tuple[float, int]]
    # Seconds in which a collective ran. None if the engine's trace does not show collectives.
    communication_s: float | None
    device: str  # "CPU" or "GPU": the device on which the seconds of `operators` were measured
    lost: str = ""  # why the trace could not be written; "" if it was


class Profiler(Protocol):
    """The profiler of one engine, which `Backend.profiler` creates."""

    def start(self) -> None:
        """Begin the warm-up. Called before an update."""

    def step(self) -> None:
        """Record that an update has ended."""

    def stop(self) -> Profile | None:
        """Write the trace and release everything. Return None if nothing was recorded."""


def make(fit: LoggedFit) -> list[Callback]:
    """Return the profiling callback, on every rank, because each rank writes a trace."""
    return [Profiling(fit)]


def is_on(merged: MergedConfig) -> bool:
    """Return whether a profile is asked for."""
    return merged.config.profile


def check(merged: MergedConfig) -> None:
    """Raise ConfigError if a schedule is set without `profile`."""
    given = [name for name in _SCHEDULE if merged.is_given(name) and not merged.is_overruled(name, "profile")]
    if given and not merged.config.profile:
        value = getattr(merged.config, given[0])
        raise ConfigError(f"{given[0]}={value} has no effect without a profile: set profile=True (--profile) too")


class Profiling(Callback):
    """Profile the updates that the settings select, once in a fit."""

    def __init__(self, fit: LoggedFit) -> None:
        config = fit.merged.config
        self._fit = fit
        self._wait, self._length = config.profile_wait, config.profile_warmup + config.profile_active
        self._directory = fit.run.path / "profile"
        self._profiler: Profiler | None = fit.backend.observer.profiler(
            self._directory, config.profile_warmup, config.profile_active
        )
        self._done = 0  # number of updates in this fit
        self._is_started = False

    def on_train_start(self, state: TrainState) -> None:
        if not self._wait:
            self._start()

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self._profiler is None:
            return
        self._done += 1
        if self._done == self._wait:
            self._start()
        elif self._done > self._wait:
            self._profiler.step()
            if self._done == self._wait + self._length:
                self._finish(state.step)

    def on_train_end(self, state: TrainState) -> None:
        if self._profiler is not None:
            self._finish(state.step)

    def on_error(self, state: TrainState, error: BaseException) -> None:
        if self._profiler is not None and self._is_started:
            self._profiler.stop()
        self._profiler = None

    def _start(self) -> None:
        if self._profiler is not None:
            self._profiler.start()  # if it raises, there is nothing to stop
            self._is_started = True

    def _finish(self, step: int) -> None:
        """Stop the profiler, and show on the main process what it recorded."""
        profiler, self._profiler = self._profiler, None
        found = profiler.stop() if profiler is not None and self._is_started else None
        recorded = min(self._done - self._wait, self._length) - (self._length - self._fit.merged.config.profile_active)
        if not self._fit.context.is_main_process:
            return
        if found is None or recorded < 1:
            text = (
                f"nothing was profiled: the run ended after {self._done} updates, and the first"
                f" {self._wait + self._length - self._fit.merged.config.profile_active} come before the recording:"
                " lower profile_wait or profile_warmup"
            )
            self._fit.on_event({"kind": "warning", "text": text})
            return
        if found.lost:
            text = f"the trace cannot be written to {self._directory} ({found.lost})"
            self._fit.on_event({"kind": "warning", "text": text})
        for line in lines(found, recorded, step, self._directory):
            self._fit.on_event({"kind": "notice", "text": line})


def lines(profile: Profile, updates: int, step: int, directory: Path) -> list[str]:
    """Return the lines for the user: where the traces are, the costliest operators, the share of communication."""
    which = f"updates {step - updates + 1} to {step}" if updates > 1 else f"update {step}"
    total = sum(seconds for seconds, _ in profile.operators.values()) or 1.0
    lines = [f"profile of {which}: {directory}, costliest operators by their own {profile.device} time:"]
    for name, (seconds, calls) in costliest(profile.operators):
        lines.append(
            f"  {seconds / total:6.1%}  {seconds / updates * 1000:8.3f} ms  {calls / updates:5.4g} calls an update  {name}"
        )
    if profile.communication_s is not None:
        share = profile.communication_s / profile.seconds if profile.seconds else 0.0
        lines.append(
            f"  communication: under way in {share:.1%} of the time, whether or not it overlaps with computation"
        )
    return lines


def costliest(operators: Mapping[str, tuple[float, int]]) -> Sequence[tuple[str, tuple[float, int]]]:
    """Return the few operators that took the most seconds, longest first."""
    return sorted(operators.items(), key=lambda item: -item[1][0])[:_COSTLIEST]


def length_of_union(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length that is covered by any of the intervals (begin, end)."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return covered
