"""Give the callbacks of a fit their context, and collect and restore their states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.callbacks.base import Callback, FitContext
from distributed.callbacks.of_keras import KerasCallback
from distributed.errors import CheckpointError, escaped

if TYPE_CHECKING:
    from distributed.state import TrainState


@contextlib.contextmanager
def bound(callbacks: Sequence[Callback], context: FitContext) -> Iterator[None]:
    """Set `context` as the context of `callbacks` inside the `with` block."""
    before = [Callback._bind(callback, context) for callback in callbacks]
    try:
        yield
    finally:
        for callback, earlier in zip(callbacks, before, strict=True):
            Callback._bind(callback, earlier)


def before_update(callbacks: Sequence[Callback], state: TrainState) -> list[Callable[[], None]]:
    """Return functions that call `on_before_update` of the callbacks that override it."""
    return [
        functools.partial(callback.on_before_update, state)
        for callback in callbacks
        if type(callback).on_before_update is not Callback.on_before_update
    ]


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the state of each callback that has one, by the name of its class, for a checkpoint."""
    return {key: kept for key, callback in _keyed(callbacks).items() if (kept := callback.state_dict())}


def load_states(callbacks: Sequence[Callback], kept: Mapping[str, Any]) -> list[str]:
    """Restore each callback's part of `kept`, which `states` returned. A callback without a part keeps its state.

    Returns the names in `kept` that no callback matches. Raises CheckpointError if a state does not fit its callback.
    """
    keyed = _keyed(callbacks)
    for key, callback in keyed.items():
        if (state := kept.get(key)) is not None:
            try:
                callback.load_state_dict(state)
            except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
                raise CheckpointError(
                    f"the checkpoint holds a state of {key} that does not fit it ({type(error).__name__}: {error})"
                ) from escaped(error)
    return [key for key in kept if key not in keyed]


def _keyed(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the name of their class.

    The second and later callbacks of a class get a number, which does not depend on callbacks of other classes.
    """
    keyed: dict[str, Callback] = {}
    for callback in callbacks:
        name = _class_name(callback)
        number = 1 + sum(_class_name(other) == name for other in keyed.values())
        keyed[name if number == 1 else f"{name}:{number}"] = callback
    return keyed


def _class_name(callback: Callback) -> str:
    return type(callback.keras if isinstance(callback, KerasCallback) else callback).__name__
