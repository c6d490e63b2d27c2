"""Errors that a user can cause, each with the setting, its value, the rule and the fix. What an engine raises passes as it is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DistributedError(Exception):
    """Base of every error that is the caller's to fix; the command line prints it without a traceback."""

    exit_code = 1
    is_echo = False  # of another rank's error, which says it


class ConfigError(DistributedError):
    """A setting, a file or a combination of them is wrong; nothing was started."""

    exit_code = 2


class ScriptError(ConfigError):
    """The script is not valid Python; nothing was started. The exit code is python's own."""

    exit_code = 1


class ResourceError(DistributedError):
    """A backend, a library, a device or a port is missing."""

    exit_code = 3


class TrainingError(DistributedError):
    """Training itself failed: a NaN loss, a worker that died, a checkpoint that could not be written."""

    exit_code = 1


class CheckpointError(ConfigError):
    """A checkpoint is damaged, unreadable or belongs to another model."""


class TrainingInterrupted(SystemExit):
    """Raised out of `fit` after SIGTERM or SIGINT, when the state has been saved; leaves with 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def nearest(word: object, known: Iterable[str]) -> str:
    """The known name closest to `word` as a phrase for a message, or "" where none is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
