"""Profile some updates of one rank with torch's profiler.

The profiler writes a trace for TensorBoard and Perfetto, and returns the totals of operators.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, schedule, tensorboard_trace_handler

from distributed.errors import ConfigError
from distributed.loggers.profiling import Profile, length_of_union

_COLLECTIVES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "mpi:", "horovod:")
_STEP = "ProfilerStep"


class TorchProfiler:
    """Implement `distributed.loggers.profiling.Profiler` with torch's profiler."""

    def __init__(self, directory: Path, rank: int, device: torch.device, warmup: int, active: int) -> None:
        self._has_gpu = device.type == "cuda"
        self._write = tensorboard_trace_handler(str(directory), worker_name=f"rank-{rank}", use_gzip=True)
        self._found: Profile | None = None
        self._left = warmup  # warm-up updates left
        self._began = self._ended = 0.0  # when the warm-up ended, and when the newest update ended
        self._profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._has_gpu],
            schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._take,
            # Workaround (torch 2.13, pytorch/pytorch#180348; may go when the warning is limited to several cycles):
            # otherwise torch warns that events of earlier cycles are dropped, although there is only one cycle.
            acc_events=True,
        )

    def start(self) -> None:
        if torch.autograd._profiler_enabled():
            raise ConfigError(
                "profile=True cannot start, because another torch profiler is already running: drop one of the two"
            )
        self._profile.start()

    def step(self) -> None:
        self._ended = time.perf_counter()
        self._profile.step()
        self._left -= 1
        if self._left == 0:  # the profiler records from here on
            self._began = time.perf_counter()

    def stop(self) -> Profile | None:
        if self._found is None:  # work after the newest update is recorded too
            self._ended = time.perf_counter()
        self._profile.stop()
        return self._found

    def _take(self, profile: Any) -> None:
        with warnings.catch_warnings():
            # Workaround (torch 2.13, no upstream issue known; may go when the profiler reads its events without warnings):
            # it warns about its own clock.
            warnings.simplefilter("ignore")
            self._found = self._summed(profile)
            try:
                self._write(profile)
            except (OSError, RuntimeError) as error:  # the disk failed, in Python or in torch: the run continues
                self._found = dataclasses.replace(self._found, lost=str(error))

    def _summed(self, profile: Any) -> Profile:
        """Return the total times of operators and collectives in the profile."""
        events = [event for event in profile.events() if event.name.startswith(_COLLECTIVES)]
        collectives = [(event.time_range.start, event.time_range.end) for event in events]  # in microseconds
        operators = {}
        for row in profile.key_averages():
            own = row.self_device_time_total if self._has_gpu else row.self_cpu_time_total
            if own and not getattr(row, "is_user_annotation", False) and not row.key.startswith((_STEP, *_COLLECTIVES)):
                operators[row.key] = (own / 1e6, row.count)
        return Profile(
            seconds=self._ended - self._began,
            operators=operators,
            communication_s=length_of_union(collectives) / 1e6 if collectives else None,
            device="GPU" if self._has_gpu else "CPU",
        )
