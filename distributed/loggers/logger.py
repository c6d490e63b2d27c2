"""Logger, the base class of a user's own loggers; how what they get is kept and delivered belongs in `delivery`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import LoggedMedia


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """Facts about a run that a `Logger` gets when it opens.

    Attributes:
        id: a random id of the run. It stays the same when the run is resumed, so that a tracker can continue its log.
        name: the name of the run directory.
        run_dir: the absolute path of the run directory. Files of the logger itself belong in `RUN/loggers`.
        hyperparameters: the settings that were given, the other values of a sweep, and the backend, the world size and the
            global batch size, by name.
        step: the number of updates done before this attempt, above 0 if the run was resumed.
    """

    id: str
    name: str
    run_dir: Path
    hyperparameters: Mapping[str, Any]
    step: int


class Logger:
    """Base class of loggers for `Trainer(loggers=[...])`. Override the methods that you need.

    `check` is called in every process that creates the Trainer. All other methods are called in one thread of the main
    process, one after the other and in the order of the run. Training does not wait for them, so they may be slow. Calls
    that were not made yet are kept in a file of the run directory, and the next attempt of the run makes them. After a kill,
    the newest calls may be repeated, and those of the last `buffered_s` seconds are.

    If a method raises an OSError, such as a ConnectionError, the call is repeated later. After any other error the call is
    left out. The first error is shown as a warning, and training continues.

    Attributes:
        buffered_s: the number of seconds for which a library may keep in memory what a call gave to it. After a kill, the calls of
            this time are repeated, because their values may be lost. `close` must store everything. 0 if each call stores its values.
    """

    buffered_s: float = 0.0

    def check(self) -> None:
        """Check that the logger can be used. Called in every process before training.

        Raises:
            ResourceError: a library is missing. Name the command that installs it.
        """

    def open(self, run: LoggedRun) -> None:
        """Open the log of a run. Called before anything is logged, and again in each further attempt or `fit`.

        Args:
            run: facts about the run.
        """

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log values of one step. A name and step that were logged once are not logged again when a run is resumed.

        Args:
            step: the number of updates done.
            metrics: name -> value over all ranks, under the names of `History` (`loss`, `val_loss`). The names `time/step_s` and
                so on are the seconds of the parts of an update.
        """

    def log_media(self, media: LoggedMedia) -> None:
        """Log an image, a text, a table, audio or a figure.

        Args:
            media: its name, kind and step. `media.path` is the absolute path of its file.
        """

    def close(self, status: str) -> None:
        """Close the log at the end of the run. A killed run is not closed, but may be opened again.

        Args:
            status: "finished", "interrupted" or "failed".
        """


def split_loggers(loggers: Any) -> tuple[list[Logger], list[str]]:
    """Return (objects, names). Lets each object check its library. Raises ConfigError for anything else."""
    given = loggers.split(",") if isinstance(loggers, str) else loggers
    if isinstance(given, Logger) or not isinstance(given, Sequence):
        raise ConfigError(f"loggers is a {type(loggers).__name__}: pass a list, loggers=[...]")
    objects = [each for each in given if not isinstance(each, str)]
    for each in objects:
        if isinstance(each, type) and issubclass(each, Logger):
            raise ConfigError(
                f"loggers has the class {each.__name__} instead of an object of it: pass {each.__name__}()"
            )
        if not isinstance(each, Logger):
            raise ConfigError(f"logger {each!r} is not a name or a distributed.Logger: derive its class from Logger")
        each.check()
    return objects, [each for each in given if isinstance(each, str)]
