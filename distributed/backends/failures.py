"""Errors in a user's metric: they name it, and every rank raises what one of them meets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed.errors import ConfigError, DistributedError, TrainingError
from distributed.launching.causes import place_of


class Failures:
    """Keeps the first error of this rank until all ranks raise it together."""

    def __init__(self) -> None:
        self.error: DistributedError | None = None

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Keep an error of the block, which is the code of metric `name`, instead of raising it here alone."""
        try:
            yield
        except Exception as error:  # of the user's code anything may come, and the other ranks wait for this one
            self.error = self.error or _named(name, error)

    @property
    def described(self) -> list[Any] | None:
        """What the other ranks are told of the error; None where there is none."""
        return None if self.error is None else [isinstance(self.error, ConfigError), str(self.error)]

    def raise_together(self, described: Sequence[list[Any] | None]) -> None:
        """Raise this rank's own error, or else the first of `described`. Every rank calls it with the same."""
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
    made = TrainingError(f"metric {name!r} failed: {type(error).__name__}: {error}{place_of(error)}")
    made.__cause__ = error
    return made


def no_arguments(name: str) -> ConfigError:
    """The error for a metric of which nothing says what it is computed from."""
    return ConfigError(
        f"metric {name!r} is computed over all samples, and it is not known from what: return its arguments from"
        f" training_step, {{'loss': loss, {name!r}: (outputs, targets)}}"
    )


def not_called(name: str) -> ConfigError:
    """Return the error for a metric function that is never called, because there are no targets."""
    return ConfigError(
        f"metric {name!r} has no targets to compare outputs with: return its value from training_step,"
        f" {{'loss': loss, {name!r}: value}}, or its arguments for distributed.over_all(...)"
    )


def not_a_number(name: str, value: Any) -> TrainingError:
    """The error for a metric that returned something else."""
    what = f"a {type(value).__name__}"
    if hasattr(value, "shape"):
        what += f" of shape {list(value.shape)}"
    return TrainingError(
        f"metric {name!r} gave {what} over all samples: give a number, (sum, count) or a dict of numbers"
    )


def not_a_loss(value: Any, metric: str | None) -> ConfigError:
    """The error for what a loss function, or the function `metric`, returned and nobody can take a mean of."""
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
