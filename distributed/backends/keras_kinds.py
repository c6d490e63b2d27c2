"""Recognize models, optimizers and schedules of Keras without importing Keras."""

from __future__ import annotations

import sys
from typing import Any


def is_model(value: Any) -> bool:
    """Return True if `value` is a Keras 3 model of any engine. Imports nothing: without keras there is no such
    model."""
    return _is_a(value, "Model")


def is_optimizer(value: Any) -> bool:
    """Return True if `value` is a Keras optimizer of any engine."""
    return _is_a(value, "Optimizer")


def is_schedule(value: Any) -> bool:
    """Return True if `value` is a Keras LearningRateSchedule."""
    keras = sys.modules.get("keras")
    schedules = getattr(getattr(keras, "optimizers", None), "schedules", None)
    return schedules is not None and isinstance(value, schedules.LearningRateSchedule)


def _is_a(value: Any, name: str) -> bool:
    keras = sys.modules.get("keras")
    cls = getattr(keras, name, None) if hasattr(keras, "ops") else None  # Keras 2 has no `ops`
    return isinstance(cls, type) and isinstance(value, cls)
