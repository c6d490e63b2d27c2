"""The rows of finished epochs, on their way from rank 0 to the process that called `fit`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]


class Epochs:
    """Call `on_row` with the row of each finished epoch once: after a restart, some epochs are trained again."""

    def __init__(self, on_row: Callable[[Row], None]) -> None:
        self._on_row = on_row
        self._last_steps: dict[str, int] = {}  # run directory -> the step at the end of its last epoch

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take any event of the main process."""
        if event.get("kind") == "epoch" and event["row"]["step"] > self._last_steps.get(event["run"], -1):
            self._last_steps[event["run"]] = event["row"]["step"]
            self._on_row(event["row"])


def write_row(fd: int | None, row: Row) -> None:
    """Write one row as a JSON line to the descriptor `fd`, if it is not None and its reader has not ended."""
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps(row).encode() + b"\n")


class Caller:
    """Call `on_epoch`, if it is not None, with each row until it raises. Then call `stop` once and keep the error."""

    def __init__(self, on_epoch: Callable[[Row], None] | None, stop: Callable[[], None]) -> None:
        self._on_epoch, self._stop = on_epoch, stop
        self.error: BaseException | None = None  # the caller raises it once training has ended

    def __call__(self, row: Row) -> None:
        if self._on_epoch is None or self.error is not None:
            return
        try:
            self._on_epoch(row)
        except BaseException as error:  # of any kind: the workers must end first
            self.error = error
            self._stop()
