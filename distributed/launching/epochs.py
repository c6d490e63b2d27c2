"""Pass events to the process that called `fit` while its workers run, such as the metrics of each epoch from rank 0."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from distributed.state import EpochMetrics


class Epochs:
    """Call `on_epoch` once with each row of the run, even if a restart trains the same steps again.

    A row has the metrics of a finished epoch, or of a validation if validations do not follow the epochs. A row before the first
    update is left out, because nothing was trained yet.
    """

    def __init__(self, on_epoch: Callable[[EpochMetrics], None]) -> None:
        self._on_epoch = on_epoch
        self._last_steps: dict[str, int] = {}  # run directory -> the step of its last row

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the main process. Events other than rows are ignored."""
        if event.get("kind") == "row" and event["row"]["step"] > self._last_steps.get(event["run"], 0):
            self._last_steps[event["run"]] = event["row"]["step"]
            self._on_epoch(event["row"])


def write_line(fd: int | None, value: Any) -> None:
    """Write `value` as a JSON line to the descriptor `fd`, if it is not None and its reader has not ended."""
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps(value).encode() + b"\n")


class Caller:
    """Call `on_epoch`, if it is not None, with the metrics of each epoch until it raises. Then call `stop` once and keep the error."""

    def __init__(self, on_epoch: Callable[[EpochMetrics], None] | None, stop: Callable[[], None]) -> None:
        self._on_epoch, self._stop = on_epoch, stop
        self.error: BaseException | None = None  # `fit` raises it once training has ended

    def __call__(self, metrics: EpochMetrics) -> None:
        if self._on_epoch is None or self.error is not None:
            return
        try:
            self._on_epoch(metrics)
        except BaseException as error:  # also KeyboardInterrupt: the workers must end first
            self.error = error
            self._stop()
