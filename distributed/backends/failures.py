"""Raise an error in a user's metric on every rank, with the name of the metric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed.errors import ConfigError, DistributedError, TrainingError
from distributed.launching.causes import location_of


class Failures:
    """Keep the first error of this rank until all ranks raise it together."""

    def __init__(self) -> None:
        self.error: DistributedError | None = None

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Keep an error that the code of metric `name` raises in the block, instead of raising it on this rank alone."""
        try:
            yield
        except (
            Exception
        ) as error:  # a user's code may raise any error, and raising it here would leave the other ranks waiting
            self.error = self.error or _named(name, error)

    @property
    def described(self) -> list[Any] | None:
        """Description of this rank's error to send to the other ranks, or None if there is no error."""
        return None if self.error is None else [isinstance(self.error, ConfigError), str(self.error)]

    def raise_together(self, described: Sequence[list[Any] | None]) -> None:
        """Raise this rank's own error, or else the first of `described`. Every rank calls it with the same argument."""
        own, self.error = self.error, None
        found = next((each for each in described if each is not None), None)
        if found is None:
            return
        if own is not None:
            raise own
        echo = (ConfigError if found[0] else TrainingError)(found[1])
        echo.is_echo = True
        raise echo


def _named(name: str, error: Exception) -> DistributedError:
    if isinstance(error, DistributedError):
        return error if repr(name) in str(error) else type(error)(f"metric {name!r}: {error}")
    where = f" ({location})" if (location := location_of(error)) else ""
    made = TrainingError(f"metric {name!r} failed: {type(error).__name__}: {error}{where}")
    made.__cause__ = error
    return made


def no_arguments(name: str) -> ConfigError:
    """Return the error for a metric over all samples whose arguments are not known."""
    return ConfigError(
        f"metric {name!r} is computed over all samples, but its arguments are unknown: return them from"
        f" training_step, {{'loss': loss, {name!r}: (outputs, targets)}}"
    )


def not_called(name: str) -> ConfigError:
    """Return the error for a metric function that is never called, because there are no targets."""
    return ConfigError(
        f"metric {name!r} has no targets to compare outputs with: return its value from training_step,"
        f" {{'loss': loss, {name!r}: value}}, or its arguments for distributed.over_all(...)"
    )


def not_a_number(name: str, value: Any) -> TrainingError:
    """Return the error for a metric over all samples that returned no number."""
    what = f"a {type(value).__name__}"
    if hasattr(value, "shape"):
        what += f" of shape {list(value.shape)}"
    return TrainingError(
        f"metric {name!r} gave {what} over all samples: give a number, (sum, count) or a dict of numbers"
    )


def not_a_loss(value: Any, metric: str | None) -> ConfigError:
    """Return the error for a `value` that cannot be averaged, returned by the loss function or by the function
    `metric`."""
    kind = type(value).__name__
    if metric is None:
        return ConfigError(
            f"a loss of type {kind} is not a number, a tensor or a pair (sum, count): return one of these"
        )
    text = (
        f"metric {metric!r} gave a {kind}, which is not a number, a tensor or a pair (sum, count): return one of these"
    )
    if isinstance(value, Mapping):
        text += f", or pass metrics={{{metric!r}: distributed.over_all(function)}}, which may return a dict of numbers"
    return ConfigError(text)
