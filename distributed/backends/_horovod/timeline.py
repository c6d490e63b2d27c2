"""Record Horovod's timeline, a trace of its collectives, in one file for each fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError
from distributed.state import OnEvent

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig
    from distributed.loggers.profiling import Profile, Profiler

_OF_A_PROFILE = "profile/horovod-timeline.json"


def is_prepared(config: DistributedConfig) -> bool:
    """Return True if Horovod must be started so that a timeline can begin later."""
    return config.options("horovod").timeline is not None or config.profile


class Timeline:
    """Timeline of all ranks, which the main process writes to the file `name` in the run directory. Nothing is written
    if `name` is None."""

    def __init__(self, hvd: Any, name: str | None) -> None:
        self._hvd, self._name = hvd, name
        self._is_running = False

    def start(self, run_dir: Path | None) -> None:
        """Begin the timeline. Do nothing if there is no run directory."""
        if self._name is None or run_dir is None:
            return
        path = (run_dir / self._name).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._hvd.start_timeline(str(path))
        except ValueError:
            raise ConfigError(
                f"horovod.timeline={self._name!r} cannot begin, because Horovod already runs in this process without a timeline: set"
                " HOROVOD_TIMELINE=DYNAMIC before hvd.init(), or the option on the script's first trainer"
            ) from None
        self._is_running = True

    def stop(self) -> None:
        """End the timeline and complete its file."""
        if self._is_running and self._hvd.is_initialized():
            self._hvd.stop_timeline()
        self._is_running = False


class WithTimeline:
    """Profiler that also writes a timeline. An engine's trace does not contain the work of Horovod's threads."""

    def __init__(self, profiler: Profiler, hvd: Any, run_dir: Path | None, on_event: OnEvent) -> None:
        self._profiler, self._run_dir, self._on_event = profiler, run_dir, on_event
        self._timeline = Timeline(hvd, _OF_A_PROFILE)

    def start(self) -> None:
        self._profiler.start()  # start the profiler first: if it raises an error, no timeline has begun
        try:
            self._timeline.start(self._run_dir)
        except ConfigError:
            text = "the profile has no timeline: Horovod started before this trainer, without HOROVOD_TIMELINE=DYNAMIC"
            self._on_event({"kind": "warning", "text": text})

    def step(self) -> None:
        self._profiler.step()

    def stop(self) -> Profile | None:
        self._timeline.stop()
        return self._profiler.stop()
