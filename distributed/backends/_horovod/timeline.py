"""Horovod's trace of its collectives, one file for each fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.errors import ConfigError


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
