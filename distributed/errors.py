"""Errors that a user can cause, which name the setting, its value, the rule and the fix; errors of engines do not belong here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def shown(text: str, keep: str = "") -> str:
    """Return `text` with each control character except those in `keep` as its Python escape, such as `\\x1b`.

    A terminal would obey such characters, and they may come from a file that somebody else wrote.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def escaped(error: E) -> E:
    """Return `error` after replacing the control characters in its arguments, for a traceback that shows it as the cause of another error."""
    error.args = tuple(shown(each, keep="\n\t") if isinstance(each, str) else each for each in error.args)
    return error


class DistributedError(Exception):
    """Base of all errors that the caller can fix. The command line prints them without a traceback.

    In its message, control characters are shown as escapes.
    """

    exit_code = 1
    is_echo = False  # repeats the error of another rank

    def __str__(self) -> str:
        return shown(super().__str__(), keep="\n\t")


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
