"""Find out whether objects, classes and functions are defined in Keras. Imports no Keras."""

from __future__ import annotations

from typing import Any


def keras_classes(value: Any) -> list[type]:
    """Return the classes of Keras of which `value` is an instance, the most derived first."""
    return [cls for cls in type(value).__mro__ if is_from_keras(cls)]


def is_from_keras(value: Any) -> bool:
    """Return whether the class or function `value`, or the class of the object `value`, is defined in Keras."""
    return str(getattr(value, "__module__", "")).startswith("keras.")
