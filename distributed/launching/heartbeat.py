"""Shared memory through which a worker reports its progress in training and its times to the launcher.

A worker only writes a few integers: no system call, no lock, no collective. The launcher reads them while the worker runs, and also
after its end. Imports no framework.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence


class Phase(enum.IntEnum):
    """Phase of a worker: the part of training that it is in."""

    SCRIPT = 0  # outside of a fit
    START = 1
    DATA = 2
    TRAINING = 3
    CALLBACKS = 4
    VALIDATION = 5
    SAVING = 6
    END = 7

    @property
    def words(self) -> str:
        """The phase as messages name it."""
        return _WORDS[self]

    @property
    def in_fit(self) -> str:
        """The phase as messages name it, or "" outside of a fit."""
        return "" if self is Phase.SCRIPT else self.words


_WORDS = {
    Phase.SCRIPT: "outside of a fit", Phase.START: "start of the fit", Phase.DATA: "reading data", Phase.TRAINING: "training",
    Phase.CALLBACKS: "callbacks", Phase.VALIDATION: "validation", Phase.SAVING: "saving a checkpoint", Phase.END: "end of the fit",
}  # fmt: skip

# The integers of a worker. The first one counts all changes: ranks that do the same have the same count.
_BEATS, _STEP, _PHASE, _IS_SLOW, _FIT, _FIRST, _COMPILES, _TIMEOUT_MS, _PID = range(9)
_UPDATES, _DATA_NS, _TRAINING_NS, _WAITED_NS, _MEASURED = range(9, 14)  # sums over the updates of all fits, see `Spent`
NUM_VALUES = 14
_SLOT_BYTES = NUM_VALUES * 8
_SUMS = {Phase.DATA: _DATA_NS, Phase.TRAINING: _TRAINING_NS}  # the integer that counts the time of a phase
_CHANGE = struct.Struct("4q")  # the first four integers
_MOST_BEATS = 1 << 40  # limit of the beats of one fit
_NUM_FRESH = 2  # the first updates of a fit may be slow, because buffers are allocated and loader processes start
STACKS_SIGNAL = signal.SIGQUIT  # makes a worker write the stacks of its threads
_CRASH = "Fatal Python error: "  # the first words of a report by faulthandler
_PHASE_OF = "_distributed_phase"  # attribute of an error: the phase of the fit that it has left


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a worker in training.

    Attributes:
        beats: a counter of progress reports. The other ranks wait for the rank with the lowest value.
        fit: the number of fits that the worker has begun.
        step: the update that it makes or has just made, from 1, or 0 before the first one.
        phase: what it does.
        is_slow: whether this may take much longer than a part of an update usually takes.
        timeout_s: how long the worker waits in a collective, or 0 if it has not said so yet.
        pid: the process id.
    """

    beats: int
    fit: int
    step: int
    phase: Phase
    is_slow: bool
    timeout_s: float
    pid: int

    @property
    def words(self) -> str:
        """The progress as messages name it."""
        return f"in step {self.step} ({self.phase.words})" if self.step else f"before step 1 ({self.phase.words})"


@dataclasses.dataclass(frozen=True)
class Spent:
    """The time that a worker has spent in the updates of all fits so far.

    Attributes:
        fit: the number of fits that the worker has begun.
        updates: the number of updates.
        data_s: seconds in which it read data, without the first batch of an epoch.
        training_s: seconds from the batch to the end of the update, including the time it waited for other ranks.
        waited_s: the part of `training_s` in which it waited for other ranks, if the engine measures this.
        measured: the number of updates that `waited_s` covers, 0 if the engine does not measure it.
    """

    fit: int
    updates: int
    data_s: float
    training_s: float
    waited_s: float
    measured: int


class Heartbeat:
    """Write the progress and the times of this worker. Without a launcher, they go to memory that is not shared."""

    def __init__(self) -> None:
        self._slot = memoryview(bytearray(_SLOT_BYTES)).cast("q")
        self._beats = 0
        self._sum, self._since = 0, 0  # the integer that counts the time of the phase, or 0, and when the phase began
        self.is_read = False  # whether a launcher reads the memory
        self.writes_stacks = False  # whether this process writes its stacks on request

    def attach(self, slot: memoryview) -> None:
        """Write into the shared memory `slot` from now on."""
        self._slot, self.is_read = slot, True
        slot[_PID] = os.getpid()

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """Return a context manager for the block that prepares and runs a fit."""
        slot = self._slot
        slot[_FIT] += 1
        slot[_FIRST] = slot[_COMPILES] = slot[_TIMEOUT_MS] = 0
        self._beats = slot[_FIT] * _MOST_BEATS  # the same on all ranks, whatever they have done before
        self.mark(Phase.START, 0, is_slow=True)
        try:
            yield
        except BaseException as error:
            vars(error).setdefault(_PHASE_OF, self.progress.phase)
            raise
        finally:
            self.mark(Phase.SCRIPT, slot[_STEP])

    def begin(self, step: int, *, compiles: bool, timeout_s: float) -> None:
        """Report that training begins.

        Args:
            step: the number of updates so far.
            compiles: whether any update may compile the model again.
            timeout_s: how long a rank waits in a collective, in seconds.
        """
        self._slot[_FIRST], self._slot[_COMPILES], self._slot[_TIMEOUT_MS] = step, compiles, int(1000 * timeout_s)
        self.mark(Phase.START, step, is_slow=True)

    def mark(self, phase: Phase, step: int, *, is_slow: bool = False) -> None:
        """Report the phase of this rank. All ranks must report the same phases in the same order, because their beats are compared.

        Args:
            phase: what the rank does from now on.
            step: the update that it makes or has just made, from 1.
            is_slow: whether this may take much longer than a part of an update usually takes.
        """
        self._beats += 1
        now, slot = time.monotonic_ns(), self._slot
        if self._sum:
            slot[self._sum] += now - self._since
            slot[_UPDATES] += self._sum == _TRAINING_NS
        self._sum, self._since = 0 if is_slow else _SUMS.get(phase, 0), now
        _CHANGE.pack_into(slot, 0, self._beats, step, phase, is_slow)

    def waited(self, seconds: float, updates: int) -> None:
        """Report that this rank has waited for others for `seconds` in each of the last `updates` updates."""
        # A launcher refuses negative values, and the clock of a device may run backwards.
        self._slot[_WAITED_NS] += max(0, int(1e9 * seconds * updates))
        self._slot[_MEASURED] += max(0, updates)

    @property
    def progress(self) -> Progress:
        """The progress of this process."""
        return progress_in(self._slot.tolist())


class Reports(abc.ABC):
    """Reports of the workers of a launcher, by any key. `Board` is the implementation for workers of this machine."""

    @abc.abstractmethod
    def values(self, index: int) -> list[int]:
        """Return the integers that a worker has reported, also after its end."""

    @abc.abstractmethod
    def crash(self, index: int) -> str:
        """Return the stacks that a worker has written when a signal such as SIGSEGV ended it, or ""."""

    def progress(self, index: int) -> Progress:
        """Return the progress of a worker, also after its end."""
        return progress_in(self.values(index))

    def spent(self, index: int) -> Spent:
        """Return the time that a worker has spent so far."""
        values = self.values(index)
        data_s, training_s, waited_s = (values[each] / 1e9 for each in (_DATA_NS, _TRAINING_NS, _WAITED_NS))
        return Spent(values[_FIT], values[_UPDATES], data_s, training_s, waited_s, values[_MEASURED])


class Board(Reports):
    """Memory with the progress of workers, and files for their stacks. Processes that are forked later share both.

    Args:
        num_workers: the number of workers.
        files: `Board.files` of another process, whose board this one shares. This process has inherited the descriptors.

    Attributes:
        files: the descriptors of the files: that of the memory, and those for the stacks.
    """

    def __init__(self, num_workers: int, files: Sequence[int] = ()) -> None:
        self.files = [*files] or [_unnamed_file() for _ in range(1 + num_workers)]
        if not files:
            os.ftruncate(self.files[0], num_workers * _SLOT_BYTES)
        self._memory = mmap.mmap(self.files[0], num_workers * _SLOT_BYTES)
        self._slots = memoryview(self._memory).cast("q")
        self._stacks = self.files[1:]

    def join(self, index: int) -> None:
        """Make this process the worker `index`. It then reports its progress, and writes its stacks on request or in a crash."""
        _heartbeat.attach(self._slot(index))
        faulthandler.register(STACKS_SIGNAL, self._stacks[index], all_threads=True)
        _heartbeat.writes_stacks = True
        if not faulthandler.is_enabled():  # the user may have set PYTHONFAULTHANDLER
            faulthandler.enable(self._stacks[index], all_threads=True)

    def _slot(self, index: int) -> memoryview:
        return self._slots[index * NUM_VALUES : (index + 1) * NUM_VALUES]

    def values(self, index: int) -> list[int]:
        """Return the integers that a worker has written, also after its end."""
        return self._slot(index).tolist()

    def close(self) -> None:
        """Close the files. The board must not be used afterwards."""
        for fd in self.files:
            os.close(fd)

    def clear(self) -> None:
        """Forget all workers, before the next ones start."""
        self._memory[:] = bytes(len(self._memory))
        for fd in self._stacks:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # the workers share the offset, because they are forked

    def crash(self, index: int) -> str:
        """Return the stacks that a worker has written when a signal such as SIGSEGV ended it, or ""."""
        _, head, text = read_stacks(self._stacks[index]).rpartition(_CRASH)
        return head + text.partition("\nExtension modules: ")[0] if head else ""

    @property
    def stacks(self) -> Mapping[int, int]:
        """The descriptors of the files into which the workers write their stacks, by the index of the worker."""
        return dict(enumerate(self._stacks))


def read_stacks(fd: int, begin: int = 0) -> str:
    """Return the stacks that a process has written into a file from byte `begin` on."""
    return os.pread(fd, max(0, os.fstat(fd).st_size - begin), begin).decode(errors="replace")


def _unnamed_file() -> int:
    """Return the descriptor of a new file without a name, in memory where the system can do this."""
    if hasattr(os, "memfd_create"):  # not in each Python for Linux
        with contextlib.suppress(OSError):
            return os.memfd_create("distributed-worker")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def phase_of(error: BaseException) -> Phase:
    """Return the phase in which `error` has left a fit, or SCRIPT if it was raised outside of one."""
    phase = vars(error).get(_PHASE_OF)
    return phase if isinstance(phase, Phase) else Phase.SCRIPT


def progress_in(values: Sequence[int]) -> Progress:
    """Return the progress in the `values` that a worker has reported. Raises ValueError if they have no valid phase."""
    beats, step, phase, is_slow, fit, first, compiles, timeout_ms, pid = values[: _PID + 1]
    is_fresh = step - first <= _NUM_FRESH
    is_compiling = compiles and phase == Phase.TRAINING
    return Progress(beats, fit, step, Phase(phase), bool(is_slow or is_fresh or is_compiling), timeout_ms / 1000, pid)


_heartbeat = Heartbeat()


def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process."""
    return _heartbeat
