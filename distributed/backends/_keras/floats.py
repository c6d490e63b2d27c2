"""What Keras takes for a float while a run has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def floats_of(dtype: str) -> Iterator[None]:
    """Floats are `dtype` within, in float64 those of new layers too; afterwards all is as the user left it.

    Keras makes the policy of new layers of its float at the moment when it is first asked, and keeps it: the user's next
    model would be float64.
    """
    import keras
    from keras.src.backend.common import global_state

    floats, policy = keras.config.floatx(), global_state.get_global_attribute("dtype_policy")
    keras.config.set_floatx(dtype)
    if dtype == "float64":
        keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floats)
        global_state.set_global_attribute("dtype_policy", policy)
