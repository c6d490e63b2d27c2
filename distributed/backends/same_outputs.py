"""Compare the outputs of a model with those of a program that was exported from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed.errors import ConfigError

# Largest difference that counts as rounding, relative to the largest value of an output, by element type. Outputs of other
# types must be equal.
_ROUNDING = {"float64": 1e-8, "float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-2}
Output = tuple[str, Any]  # (name of the element type, values as a numpy array of float64)


def largest_difference(what: str, wanted: Sequence[Output], found: Sequence[Output]) -> float:
    """Return the largest absolute difference between two lists of outputs. NaN is equal to NaN.

    Raises ConfigError, which calls the program `what`, if shapes differ, or values by more than rounding.
    """
    shapes, others = ([list(values.shape) for _, values in outputs] for outputs in (wanted, found))
    if shapes != others:
        raise ConfigError(
            f"{what} returns {others} for the example, and the model {shapes}: the format cannot hold this model"
        )
    pairs = zip(wanted, found, strict=True)
    return max((_difference(what, kind, one, other) for (kind, one), (_, other) in pairs), default=0.0)


def _difference(what: str, kind: str, wanted: Any, found: Any) -> float:
    import numpy

    is_same = (wanted == found) | (numpy.isnan(wanted) & numpy.isnan(found))
    with numpy.errstate(invalid="ignore"):  # of infinite values
        difference = float(numpy.where(is_same, 0.0, numpy.abs(wanted - found)).max(initial=0.0))
    scale = float(numpy.abs(wanted[numpy.isfinite(wanted)]).max(initial=1.0))
    if not difference <= _ROUNDING.get(kind, 0.0) * scale:
        raise ConfigError(
            f"{what} differs from the model by {difference:.1e} for the same batch, which is more than rounding: the format cannot"
            " hold this model"
        )
    return difference
