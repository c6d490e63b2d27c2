"""Leave parameters out of the updates, for good or until an epoch or an update."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.callbacks.base import GRADIENTS, Callback
from distributed.errors import ConfigError, nearest

if TYPE_CHECKING:
    from distributed.state import TrainState


class Freeze(Callback):
    """Leave parameters out of the updates until an epoch or an update, or during the whole training.

    Their gradients are computed and then dropped before clipping, so the backward pass does not become faster. For parameters that are
    frozen from the start to the end, set `requires_grad = False` in the model instead. Buffers, such as the statistics of
    BatchNorm, still change. The moments of the optimizer begin when a parameter is no longer frozen.

    Args:
        names: starts of the names of the parameters, such as `"encoder."`, or lists of them. The variables of a Keras model have
            names such as `"dense.kernel"`.
        until_epoch: the number of epochs after which the parameters are trained.
        until_step: the number of updates after which the parameters are trained.

    Raises:
        ConfigError: both limits are given. During `fit`: no parameter has such a name, or all of them are frozen for good.
    """

    needs: ClassVar[tuple[str, ...]] = (GRADIENTS,)

    def __init__(
        self, *names: str | Sequence[str], until_epoch: int | None = None, until_step: int | None = None
    ) -> None:
        if not any(isinstance(each, str) or each for each in names):
            raise ConfigError("Freeze() freezes nothing: give the starts of the names of parameters")
        if wrong := [each for each in names if not _is_text(each)]:
            raise ConfigError(f"Freeze({wrong[0]!r:.80}) is no start of a name: give texts, such as Freeze('encoder.')")
        if until_epoch is not None and until_step is not None:
            raise ConfigError(f"until_epoch={until_epoch} and until_step={until_step} both end Freeze: drop one")
        self.names = tuple(itertools.chain.from_iterable([each] if isinstance(each, str) else each for each in names))
        self.until_epoch, self.until_step = until_epoch, until_step
        self._parameters: list[Any] = []

    @property
    def trains_later(self) -> bool:
        """True if the parameters are trained after some epoch or update."""
        return self.until_epoch is not None or self.until_step is not None

    def on_train_start(self, state: TrainState) -> None:
        known = self.context.named_parameters()
        for start in self.names:
            if not any(name.startswith(start) for name, _ in known):
                raise ConfigError(
                    f"Freeze({start!r}): no parameter's name starts with this{nearest(start, [n for n, _ in known])}"
                )
        self._parameters = [parameter for name, parameter in known if name.startswith(self.names)]
        is_for_good = self.until_epoch is None and self.until_step is None
        if is_for_good and len(self._parameters) == len(known):
            raise ConfigError("Freeze leaves no parameter to train: name fewer, or set until_epoch or until_step")

    def is_frozen(self, state: TrainState) -> bool:
        """Return whether the next update leaves the parameters out."""
        if self.until_step is not None:
            return state.step < self.until_step
        return self.until_epoch is None or state.epoch < self.until_epoch

    def on_before_update(self, state: TrainState) -> None:
        if self.is_frozen(state):
            for parameter in self._parameters:
                parameter.grad = None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value))
