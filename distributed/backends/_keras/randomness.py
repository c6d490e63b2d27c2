"""Access the global seed generator of Keras, which every random operation without a seed of its own uses."""

from __future__ import annotations

import sys
from typing import Any


def common_state(*, create: bool = False) -> Any:
    """Return the state of the global seed generator, a variable of two integers. Return None if Keras is not loaded, or
    if nothing has been drawn yet and `create` is False."""
    global_state = sys.modules.get("keras.src.backend.common.global_state")  # present only in Keras 3
    seed_generator = sys.modules.get("keras.src.random.seed_generator")
    if global_state is None or seed_generator is None:
        return None
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None and create:
        generator = seed_generator.global_seed_generator()
    return None if generator is None else generator.state
