"""Split a batch of a Keras model into inputs, targets and sample weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distributed.backends.base import TARGET_NAMES
from distributed.errors import ConfigError

_WEIGHTS = "sample_weight"


class KerasBatch(NamedTuple):
    """Parts of one batch. The model is called with `x`, a tensor, or a list or dict of tensors."""

    x: Any
    y: Any = None
    weight: Any = None


def unpacked(batch: Any) -> KerasBatch:
    """Return the parts of `batch`.

    A tuple is (x, y, sample_weight), as Keras reads it. In a dict, targets and weights have names, and all
    other entries are inputs.
    """
    if isinstance(batch, Mapping):
        return _of_names(batch)
    if not isinstance(batch, (tuple, list)):
        return KerasBatch(batch)
    if not 1 <= len(batch) <= 3:
        raise ConfigError(
            f"the batch is a sequence of {len(batch)}, but Keras takes (inputs, targets) or (inputs, targets, sample_weight):"
            " put several inputs into a tuple or dict of their own"
        )
    return KerasBatch(*batch)


def _of_names(batch: Mapping[str, Any]) -> KerasBatch:
    target = next((name for name in TARGET_NAMES if name in batch), None)
    inputs = {name: value for name, value in batch.items() if name not in (target, _WEIGHTS)}
    x = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    return KerasBatch(x, None if target is None else batch[target], batch.get(_WEIGHTS))
