"""Find the loggers that the setting `loggers` names and that are classes: those of this package and of installed packages.

A package registers a logger as an entry point: `[project.entry-points."distributed.loggers"]` with a line `name = "module:Class"`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from distributed.errors import ConfigError, nearest
from distributed.loggers.logger import Logger

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig

GROUP = "distributed.loggers"
CALLBACKS = ("tensorboard", "mlflow", "csv")  # loggers of the setting `loggers` that are no `Logger`


def _wandb() -> Logger:
    from distributed.loggers.wandb import WandbLogger

    return WandbLogger()


_OURS: Mapping[str, Callable[[], Logger]] = {"wandb": _wandb}


def check_libraries(merged: MergedConfig) -> None:
    """Let each logger that is named check its library.

    Raises ConfigError for a name that no logger has, ResourceError with the command that installs a missing library.
    """
    for each in named_loggers(merged).values():
        each.check()


def named_loggers(merged: MergedConfig) -> dict[str, Logger]:
    """Return a new logger for each name in `loggers` that belongs to a class.

    Raises ConfigError if an installed package registers something else.
    """
    return {name: _made(name) for name in merged.config.logger_names if name not in CALLBACKS}


def _made(name: str) -> Logger:
    if name in _OURS:
        return _OURS[name]()
    reference = _reference(name)
    try:
        made = pkgutil.resolve_name(reference)()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"loggers={name!r} is {reference}, which needs {error.name}, which is not installed: install it"
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"loggers={name!r} is {reference}, which cannot be made ({error}): update its package"
        ) from error
    if not isinstance(made, Logger):
        raise ConfigError(f"loggers={name!r} is {reference}, which makes no distributed.Logger: update its package")
    return made


def _reference(name: str) -> str:
    """Return "module:attribute" of the class that an installed package registers. Raises ConfigError with the nearest name if there is none."""
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if name not in found:
        known = sorted({*CALLBACKS, *_OURS, *found})
        raise ConfigError(
            f"loggers={name!r} is not a logger{nearest(name, known)}: choose from {', '.join(known)}, or pass an object in code,"
            " Trainer(loggers=[MyLogger()])"
        )
    return found[name]
