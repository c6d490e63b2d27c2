"""Read the data arguments of `Trainer.fit`: data sets, or arrays as in Keras's `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.backends.arrays import ArrayData, is_arrays
from distributed.backends.forms import is_array
from distributed.config.settings import canonical
from distributed.errors import ConfigError


def training_set(train_data: Any, x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
    """Return the training data: `train_data`, or the arrays as one data set. A data set may be passed as `x` too.

    Raises:
        ConfigError: there is no data, there is data twice, or the arrays do not fit each other.
    """
    arrays = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
    given = next((name for name, value in arrays.items() if value is not None), None)
    if train_data is not None and x is not None:
        raise ConfigError("train_data and x are both training data: drop one of them")
    if x is not None and given is None and not is_arrays(x):
        return x  # a data set
    if x is not None:
        return ArrayData(x, y, sample_weight, class_weight)
    if given is not None and train_data is not None:
        raise ConfigError(
            f"{given} belongs to arrays, but train_data is a {type(train_data).__name__}: pass x and y as arrays, or let the"
            " data set yield (inputs, targets, sample_weight)"
        )
    if train_data is None:
        raise ConfigError("fit() got no training data: pass a DataLoader or a dataset, or arrays as x and y")
    return train_data


def validation_set(val_data: Any, validation_data: Any) -> Any:
    """Return the validation data: `val_data`, or `validation_data`, which may be a tuple `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        ConfigError: both are given, or the arrays do not fit each other.
    """
    if validation_data is None:
        return val_data
    if val_data is not None:
        raise ConfigError("val_data and validation_data are both validation data: drop one of them")
    if isinstance(validation_data, tuple) and 2 <= len(validation_data) <= 3:
        return ArrayData(*validation_data)
    return validation_data


def refuse_positional(train_data: Any, val_data: Any) -> None:
    """Raise ConfigError for `fit(x, y)`, because the second argument is the validation data."""
    if is_array(train_data) and is_array(val_data):
        raise ConfigError("fit() takes data sets by position, and got two arrays: write fit(x=inputs, y=targets)")


def settings_of(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `fit` was given.

    Args:
        given: the settings that `fit` takes; None means not given.
        others: other arguments by name.

    Raises:
        ConfigError: there are `others`. The message says what to use instead.
    """
    if others:
        canonical(others)  # raises for a name that is no setting
        name, value = next(iter(others.items()))
        raise ConfigError(f"fit() does not take {name}: set it in the constructor, Trainer(..., {name}={value!r})")
    settings = {name: value for name, value in given.items() if value is not None}
    if (verbose := settings.get("verbose")) is not None and not isinstance(verbose, bool):
        if verbose not in (0, 1, 2, "auto"):
            raise ConfigError(
                f"verbose={verbose!r} is not a valid choice: pass True or False, or Keras's 0, 1, 2 or 'auto'"
            )
        settings["verbose"] = verbose != 0
    return settings
