"""Run torch's profiler together with DeepSpeed's, which counts operations, parameters and time of each module."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from distributed.backends._torch.profiler import TorchProfiler
from distributed.loggers.profiling import Profile

_FILE = "flops.txt"


class DeepSpeedProfiler(TorchProfiler):
    """Profiler that also counts floating-point operations on the main process. The count is made in the first warm-up
    update, which is not traced, because the counter's hooks would appear in the trace."""

    def __init__(
        self, directory: Path, rank: int, device: torch.device, warmup: int, active: int, model: torch.nn.Module
    ) -> None:
        super().__init__(directory, rank, device, warmup, active)
        self._model, self._rank = model, rank
        self._path = directory / _FILE
        self._counter: Any = None
        self._lost = ""

    def start(self) -> None:
        super().start()
        if self._rank == 0:
            from deepspeed.profiling.flops_profiler import FlopsProfiler

            self._counter = FlopsProfiler(self._model)
            self._counter.start_profile()

    def step(self) -> None:
        self._write_count()
        super().step()

    def stop(self) -> Profile | None:
        self._end_count()
        found = super().stop()
        if found is None or not self._lost:
            return found
        return dataclasses.replace(found, lost=found.lost or self._lost)

    def _write_count(self) -> None:
        if self._counter is not None:
            self._counter.stop_profile()
            try:
                with _same_stdout():
                    self._counter.print_model_profile(output_file=str(self._path))
            except OSError as error:  # the disk failed: the run continues
                self._lost = str(error)
            self._end_count()

    def _end_count(self) -> None:
        if self._counter is not None:
            self._counter.end_profile()
            self._counter = None


@contextlib.contextmanager
def _same_stdout() -> Iterator[None]:
    """Restore sys.stdout afterwards.

    Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when the counter restores it after an error):
    DeepSpeed's counter replaces it by a file, and does not restore it if the disk fails.
    """
    before = sys.stdout
    try:
        yield
    finally:
        file, sys.stdout = sys.stdout, before
        if file is not before:
            with contextlib.suppress(OSError):
                file.close()
