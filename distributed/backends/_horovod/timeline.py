"""Horovod's trace of its collectives, one file for each fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig
    from distributed.loggers.profiling import Profile, Profiler

_OF_A_PROFILE = "profile/horovod-timeline.json"


def is_prepared(config: DistributedConfig) -> bool:
    """Whether Horovod is to start so that a timeline can begin."""
    return config.options("horovod").timeline is not None or config.profile


class Timeline:
    """Written by the main process, for all ranks, to `name` in the run directory; nothing where that is None."""

    def __init__(self, hvd: Any, name: str | None) -> None:
        self._hvd, self._name = hvd, name
        self._is_running = False

    def start(self, run_dir: Path | None) -> None:
        """Begin it. Outside of a run there is no place for it."""
        if self._name is None or run_dir is None:
            return
        path = (run_dir / self._name).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._hvd.start_timeline(str(path))
        except ValueError:
            raise ConfigError(
                f"horovod.timeline={self._name!r} cannot begin, because Horovod runs in this process without one: set"
                " HOROVOD_TIMELINE=DYNAMIC before hvd.init(), or the option on the script's first trainer"
            ) from None
        self._is_running = True

    def stop(self) -> None:
        """End it: the file is whole."""
        if self._is_running and self._hvd.is_initialized():
            self._hvd.stop_timeline()
        self._is_running = False


class WithTimeline:
    """A profiler whose updates are in a timeline too: an engine's trace does not show what Horovod's own threads do."""

    def __init__(
        self, profiler: Profiler, hvd: Any, run_dir: Path | None, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._profiler, self._run_dir, self._report = profiler, run_dir, report
        self._timeline = Timeline(hvd, _OF_A_PROFILE)

    def start(self) -> None:
        self._profiler.start()  # first: where it refuses, no timeline is left to be ended
        try:
            self._timeline.start(self._run_dir)
        except ConfigError:
            text = "the profile has no timeline: Horovod started before this trainer, without HOROVOD_TIMELINE=DYNAMIC"
            self._report({"kind": "warning", "text": text})

    def step(self) -> None:
        self._profiler.step()

    def stop(self) -> Profile | None:
        self._timeline.stop()
        return self._profiler.stop()
