"""Decide which of several failures is the cause, and describe failures in words and tracebacks."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

from distributed.config.registry import REGISTRY, PeerErrors
from distributed.errors import DistributedError
from distributed.launching.heartbeat import Phase

# Python's own exceptions. Those of the engines, and all messages, are in the entries of the registry.
_PEER_ERRORS = PeerErrors(types=("ConnectionResetError", "BrokenPipeError"), general_types=("RuntimeError",))
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)  # a line of a traceback
_OUR_DIRECTORY = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one rank failed. `time` is in seconds since the epoch, on the clock of the rank's machine."""

    rank: int
    kind: str  # "exception", "error" (a DistributedError, shown in one line), "exit", "signal" or "hang"
    time: float
    type: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int = 1
    signum: int = 0
    node: str = ""  # name of the rank's machine, if the launcher started workers on several
    node_rank: int | None = None  # number of the rank's node, if its launcher is not the one that records this
    reached: tuple[int, int] = (0, 0)  # (number of the fit, step) of the rank; 0 for the fit if it is not known
    micro_batch: int = 0  # see TrainingError
    no_restart_because: str = ""  # why the run is not restarted, although such a failure allows a restart
    phase: str = ""  # what the rank did in its fit, in the words of `heartbeat.Phase`; "" outside of a fit
    location: str = ""  # file, line and function of the user's code, or "" if that is not known
    is_echo: bool = False  # whether it repeats the error of another rank

    @property
    def is_consequence(self) -> bool:
        """Return whether this failure only says that another rank has ended."""
        if self.kind != "exception":
            return False
        known = [_PEER_ERRORS, *(entry.peer_errors for entry in REGISTRY.values())]
        if any(self.type in errors.types for errors in known):
            return True
        # An exception of one library may contain a message of another library: Horovod raises messages of gloo.
        has_message = any(part in self.message for errors in known for part in errors.messages)
        return has_message and any(self.type in errors.general_types for errors in known)

    @property
    def weight(self) -> int:
        """The order of failures in `root_cause`.

        It is 0 for a cause, 1 for an echo or an abort in C++, which may be a consequence, and 2 for a certain consequence.
        """
        if self.is_consequence:
            return 2
        return 1 if self.is_echo or (self.kind == "signal" and self.signum == signal.SIGABRT) else 0

    def __str__(self) -> str:
        if self.kind in ("error", "hang"):
            return self.message
        rank = f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"
        if self.kind == "exception":
            return f"{rank} failed with {self.type}{' in validation' if self.phase == Phase.VALIDATION.words else ''}"
        if self.kind == "signal":
            why = f": {self.message}" if self.message else ""
            return f"{rank} was killed by signal {self.signum} ({signal_name(self.signum)}){why}"
        if self.exit_code == 0:
            return (
                f"{rank} exited with code 0 while other ranks were still running:"
                " every rank must call fit(), evaluate(), predict() and save()"
            )
        return f"{rank} exited with code {self.exit_code}"


def says_that_another_rank_has_ended(error: BaseException) -> bool:
    """Return whether the error of this process is only the consequence of the end of another rank."""
    return Failure(0, "exception", 0.0, type=type(error).__name__, message=str(error)).is_consequence


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that most likely caused the others: the earliest one of those with the lowest `weight`."""
    return min(failures, key=lambda failure: (failure.weight, failure.time))


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9, or the number as text if it has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return str(signum)


def full_traceback(error: BaseException) -> str:
    """Return the traceback of `error` from the user's script on, without the frames of this package above it."""
    return _format(error, short=False)


def short_traceback(error: BaseException) -> str:
    """Return the traceback of `error` without the frames of libraries, except the last frame: short enough for a screen."""
    return _format(error, short=True)


def message_of(error: BaseException) -> str:
    """Return the message of the error. If its `__str__` raises, the failure is still reported."""
    return traceback.TracebackException(type(error), error, None)._str  # type: ignore[attr-defined,no-any-return]


def location_of(error: BaseException) -> str:
    """Return the file, the line and the function of the user's code in which `error` was raised, or "" if that is not known.

    If an error of this package was caused by another error, the location of that other error is preferred. If a process of a data
    loader passed the error on, the message of the error contains the traceback of that process.
    """
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in _FRAME.findall(message_of(error)) if is_users(frame[0])]
    cause = error.__cause__ if isinstance(error, DistributedError) else None
    if not frames and cause is not None and (found := location_of(cause)):
        return found
    if not frames:
        traces = traceback.extract_tb(error.__traceback__)
        frames = [(each.filename, str(each.lineno), each.name) for each in traces if is_users(each.filename)]
    return "{}, line {}, in {}".format(*frames[-1]) if frames else ""


def location_of_caller(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame of the user's code, from `frame` outwards, or "" if there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def _format(error: BaseException, *, short: bool) -> str:
    exception = traceback.TracebackException(type(error), error, _users_part(error), compact=True)
    left_out = sum(_trim(part, short) for part in _chain(exception))
    text = "".join(exception.format()).rstrip("\n")
    if left_out:
        text = text.replace("call last):", f"call last; {left_out} library frames are in the log):", 1)
    return text


def _users_part(error: BaseException) -> TracebackType | None:
    """Return the traceback below the frames of this package, or all of it if it has no other frames.

    A SyntaxError of the script itself has no frame in the user's code, but its message names the file and the line.
    """
    is_syntax = isinstance(error, SyntaxError)
    part = error.__traceback__
    while part is not None:
        filename = part.tb_frame.f_code.co_filename
        if not is_ours(filename) and not (is_syntax and filename.startswith("<frozen")):
            return part
        part = part.tb_next
    return None if is_syntax else error.__traceback__


def _chain(exception: traceback.TracebackException) -> Iterable[traceback.TracebackException]:
    current: traceback.TracebackException | None = exception
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _trim(exception: traceback.TracebackException, short: bool) -> int:
    """Drop the frames of libraries from `exception` if `short` is True, and return their number.

    A traceback without any frame in the user's code keeps all frames.
    """
    frames = exception.stack
    if not short or not any(is_users(frame.filename) for frame in frames):
        return 0
    kept = [frame for i, frame in enumerate(frames) if is_users(frame.filename) or i == len(frames) - 1]
    left_out = len(frames) - len(kept)
    exception.stack[:] = kept
    return left_out


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this package."""
    return filename.startswith(_OUR_DIRECTORY)


def is_users(filename: str) -> bool:
    """Return whether a file belongs to neither this package nor a library."""
    return not is_ours(filename) and not filename.startswith("<frozen") and not is_of_library(filename)


def is_of_library(filename: str) -> bool:
    """Return whether a file belongs to a library other than this package, or to Python."""
    return not is_ours(filename) and filename.startswith((*_LIBRARIES, sys.base_prefix + "/lib/python"))
