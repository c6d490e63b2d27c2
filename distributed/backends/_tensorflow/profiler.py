"""TensorFlow's profiler over some updates of one rank: a trace for TensorBoard's profile plugin, and its totals."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from distributed.errors import ConfigError
from distributed.loggers.profiling import Profile, length_of_union

_OPERATOR = re.compile(r"[^:]+:(_?[A-Z]\w*)")  # "NAME:TYPE", as TensorFlow labels an operator
_COLLECTIVES = ("Collective", "Nccl")
_S = 1e-12  # one picosecond in seconds
Span = tuple[str, float, float]  # type of operator, begin, end in seconds


class TensorFlowProfiler:
    """Implement `distributed.loggers.profiling.Profiler` with TensorFlow's profiler. It has no warm-up mode, so the
    warm-up updates are not traced."""

    def __init__(self, directory: Path, rank: int, warmup: int, active: int) -> None:
        self._directory = directory / f"rank-{rank}"  # one per rank, or ranks of a host would write one file
        self._left = warmup
        self._began: float | None = None

    def start(self) -> None:
        """Do nothing. The trace begins after the warm-up."""

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._begin()
            self._began = time.perf_counter()

    def _begin(self) -> None:
        try:
            tf.profiler.experimental.start(str(self._directory))
        except tf.errors.AlreadyExistsError:
            raise ConfigError(
                "profile=True cannot start, because another TensorFlow profiler is already running: drop one of the two"
            ) from None

    def stop(self) -> Profile | None:
        if self._began is None:
            return None
        seconds = time.perf_counter() - self._began
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:  # the disk failed: the run continues
            return Profile(seconds, {}, None, "CPU", lost=error.message)
        return _summed(max(self._directory.rglob("*.xplane.pb")), seconds)


def _summed(trace: Path, seconds: float) -> Profile:
    """Return the total times of operators and collectives in the file `trace`."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    planes = XSpace.FromString(trace.read_bytes()).planes
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    operators: dict[str, tuple[float, int]] = {}
    collectives = []
    for plane in on_gpu or [plane for plane in planes if plane.name.startswith("/host:CPU")]:
        for line in plane.lines:
            for kind, own, begin, end in _own(sorted(_spans(plane, line), key=lambda span: (span[1], -span[2]))):
                if kind.startswith(_COLLECTIVES):
                    collectives.append((begin, end))
                    continue
                before, calls = operators.get(kind, (0.0, 0))
                operators[kind] = before + own, calls + 1
    communication = length_of_union(collectives) if collectives else None
    return Profile(seconds, operators, communication, "GPU" if on_gpu else "CPU")


def _spans(plane: Any, line: Any) -> Iterator[Span]:
    start = line.timestamp_ns * 1e-9
    for event in line.events:
        found = _OPERATOR.fullmatch(plane.event_metadata[event.metadata_id].name)
        if found is not None:
            begin = start + event.offset_ps * _S
            yield found[1], begin, begin + event.duration_ps * _S


def _own(spans: Sequence[Span]) -> Iterator[tuple[str, float, float, float]]:
    """Yield (type, own seconds, begin, end) of each operator of one thread. The own seconds exclude the operators that
    run inside it. `spans` are sorted by their begin."""
    inside = [0.0] * len(spans)
    open_: list[int] = []
    for number, (_, begin, end) in enumerate(spans):
        while open_ and spans[open_[-1]][2] <= begin:
            open_.pop()
        if open_:
            inside[open_[-1]] += end - begin
        open_.append(number)
    for (kind, begin, end), within in zip(spans, inside, strict=True):
        yield kind, max(end - begin - within, 0.0), begin, end
