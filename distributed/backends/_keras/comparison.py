"""Compute the loss of a Keras model on any engine: the user's loss, the loss of `compile`, or a default loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.backends._keras.batches import KerasBatch
from distributed.backends._keras.losses import KerasLoss, compute_in_floatx, default_loss, is_of_keras
from distributed.errors import ConfigError
from distributed.metrics.of_keras import is_from_keras


class Comparison:
    """Loss that is chosen at the first batch. `notice` is called with a message if a default loss is chosen."""

    def __init__(self, model: Any, loss_fn: Any, notice: Callable[[str], None]) -> None:
        self._model, self._notice = model, notice
        self._loss_fn = None if is_of_keras(loss_fn) else loss_fn
        self._keras_loss = KerasLoss(loss_fn) if is_of_keras(loss_fn) else None
        self._is_compiled = loss_fn is None and getattr(model, "_compile_loss", None) is not None

    def __call__(self, parts: KerasBatch, outputs: Any, training: bool) -> tuple[Any, bool]:
        """Return (loss, is_whole).

        The loss has one of the forms that a loss function may return. `is_whole` says whether it includes the
        regularisation of the model's layers.
        """
        if self._is_compiled:
            return self._by_compiled(parts, outputs, training)
        if self._loss_fn is not None:
            if parts.weight is not None:
                raise ConfigError(
                    "the batch has a sample_weight, which a loss_fn of your own does not get: use a loss of keras.losses, or"
                    " training_step"
                )
            return self._loss_fn(outputs, parts.x if parts.y is None else parts.y), False
        if self._keras_loss is None:
            function, why = default_loss(self._model, outputs, parts.y)
            self._notice(f"no loss_fn given: {why}")
            self._keras_loss = KerasLoss(function)
        return self._keras_loss(parts.y, outputs, parts.weight), False

    def build(self, targets: Any, outputs: Any) -> None:
        """Build the compiled loss of the model for its first batch."""
        if self._is_compiled and not self._model._compile_loss.built:
            self._model._compile_loss.build(targets, outputs)

    def _by_compiled(self, parts: KerasBatch, outputs: Any, training: bool) -> tuple[Any, bool]:
        """Compute the loss given to `compile`: (sum, count) if it is one loss of one output, otherwise the total that
        Keras computes."""
        import keras

        self.build(parts.y, outputs)
        compiled = self._model._compile_loss
        losses = compiled._flat_losses
        for each in (compiled, *(flat.loss for flat in losses)):
            compute_in_floatx(each)
        is_own = is_from_keras(type(self._model).compute_loss)
        if is_own and len(losses) == 1 and keras.ops.is_tensor(outputs):
            if self._keras_loss is None:
                self._keras_loss = KerasLoss(losses[0].loss, losses[0].loss_weights)
            return self._keras_loss(parts.y, outputs, parts.weight), False
        total = self._model._compute_loss(
            x=parts.x, y=parts.y, y_pred=outputs, sample_weight=parts.weight, training=training
        )
        return total, True
