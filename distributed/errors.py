"""Errors that a user can cause, which name the setting, its value, the rule and the fix; errors of engines do not belong here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class DistributedError(Exception):
    """Base of all errors that the caller can fix. The command line prints them without a traceback."""

    exit_code = 1
    is_echo = False  # repeats the error of another rank


class ConfigError(DistributedError):
    """A setting, a file or a combination of them is wrong. No training was started."""

    exit_code = 2


class ScriptError(ConfigError):
    """The script is not valid Python. No training was started. The exit code is Python's own."""

    exit_code = 1


class ResourceError(DistributedError):
    """A backend, a library, a device or a port is missing, a directory is in use, or a server does not answer."""

    exit_code = 3


class TrainingError(DistributedError):
    """Training failed: a NaN loss, a worker that died, a checkpoint that could not be written."""

    exit_code = 1
    micro_batch = 0  # if above 0, the run may restart with micro-batches of at most this many samples


class CheckpointError(ConfigError):
    """A checkpoint is damaged, unreadable or belongs to another model."""


class DamagedError(CheckpointError):
    """The files of a checkpoint are not what was saved."""


class TrainingInterrupted(SystemExit):
    """Raised by `fit` after SIGTERM or SIGINT, once the state has been saved. The process exits with 128 + signal.

    Args:
        signum: the number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


# Exit code of a process that such an error ended -> the class of the error. Other codes mean TrainingError.
BY_EXIT_CODE: Mapping[int, type[DistributedError]] = {each.exit_code: each for each in (ConfigError, ResourceError)}


_MIN_PART = 3  # letters of a name that may stand for the whole


def nearest(word: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'NAME'?)" for the name in `known` that is closest to `word`, or the only one that contains it, or ""."""
    names = list(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if not close and len(str(word)) >= _MIN_PART:
        close = [name for name in names if str(word) in name]
        close = close if len(close) == 1 else []
    return f" (did you mean {close[0]!r}?)" if close else ""
