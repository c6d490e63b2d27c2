"""Set the float type of Keras during a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def floats_of(dtype: str) -> Iterator[None]:
    """Set the float type of Keras to `dtype` within the block, and restore the user's setting afterwards.

    In float64 new layers have that type too. Workaround (Keras 3.15, no upstream issue known; may go when the policy
    can be unset by a public function): Keras creates the policy of new layers when it is first needed and then keeps it
    (`global_state`), so without the reset the user's next model would be float64.
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
