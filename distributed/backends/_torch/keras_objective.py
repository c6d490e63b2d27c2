"""Compute losses and metrics of Keras models: compiled ones, Keras losses and losses of torch tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distributed.backends._keras.batches import KerasBatch, unpacked
from distributed.backends._keras.by_name import own_metrics
from distributed.backends._keras.comparison import Comparison
from distributed.backends._keras.losses import (
    compiled_metrics,
    compute_in_floatx,
    is_of_keras,
    metric_value,
    of_output,
)
from distributed.backends._keras.measures import is_mean
from distributed.backends._torch.keras_module import KerasModule, widen
from distributed.backends._torch.keras_optimizer import Scope
from distributed.backends._torch.objective import Loss, Objective, as_loss
from distributed.backends.parts import Arguments


class KerasObjective(Objective):
    """Call a Keras model on a batch and compute its loss.

    Regularisation is added to every loss except that of a training_step.
    """

    def __init__(
        self,
        loss_fn: Any,
        training_step: Callable[..., Any] | None,
        metrics: Mapping[str, Any],
        module: KerasModule,
        notice: Callable[[str], None],
        scope: Scope,
    ) -> None:
        super().__init__(None if is_of_keras(loss_fn) else loss_fn, training_step, module, notice)
        self._module, self._model, self._scope = module, module.keras, scope
        self._comparison = Comparison(module.keras, loss_fn, self._notice_once)
        self._keras_metrics = metrics
        self._metrics: dict[str, tuple[Any, Any, bool]] | None = None  # as `compiled_metrics` returns them

    def __call__(self, model: Callable[..., Any], batch: Any, num_items: torch.Tensor | None = None) -> Loss:
        with self._scope():
            if self._training_step is not None:
                return super().__call__(model, batch)
            parts = unpacked(batch)
            outputs = model(parts.x)
            self._put_masks(outputs)
            loss = self._compare(parts, outputs)
            measured = self._measure(parts, outputs)
            return dataclasses.replace(loss, outputs=outputs, targets=parts.y, metrics=measured or None)

    def predict(self, model: Callable[..., Any], batch: Any) -> Any:
        with self._scope():
            return model(unpacked(batch).x)

    def probe(self, model: torch.nn.Module, batch: Any) -> dict[str, float]:
        return dict.fromkeys(("takes count", "shifts", "does not shift", "counts"), 0.0)

    def _put_masks(self, outputs: Any) -> None:
        """Attach the model's masks to `outputs`. DistributedDataParallel may return new tensors without their masks."""
        import keras

        for tensor, mask in zip(keras.tree.flatten(outputs), self._module.masks, strict=False):
            if mask is not None:
                tensor._keras_mask = mask

    def _compare(self, parts: KerasBatch, outputs: Any) -> Loss:
        value, is_whole = self._comparison(parts, outputs, torch.is_grad_enabled())
        return as_loss(value) if is_whole else self._regularized(as_loss(value))

    def _regularized(self, loss: Loss) -> Loss:
        extra = self._model.losses
        if extra:
            more = sum(extra)
            loss.value = loss.value + (more if loss.count is None else more * loss.count)
        return loss

    def _measure(self, parts: KerasBatch, outputs: Any) -> dict[str, Any]:
        """Return (sum, count) of metrics that are means, and the call arguments of all other metrics."""
        if parts.y is None:
            return {}
        if self._metrics is None:
            self._metrics = self._chosen(parts, outputs)
        measured: dict[str, Any] = {}
        with torch.no_grad():
            for name, (metric, position, is_weighted) in self._metrics.items():
                targets, chosen = of_output(parts.y, position), of_output(outputs, position)
                weight = parts.weight if is_weighted else None
                if is_mean(metric):
                    measured[name] = metric_value(metric, targets, chosen, weight)
                else:
                    named = {} if weight is None else {"sample_weight": weight}
                    measured[name] = Arguments((chosen, targets), named)
        return measured

    def _chosen(self, parts: KerasBatch, outputs: Any) -> dict[str, tuple[Any, Any, bool]]:
        own = own_metrics(self._keras_metrics, parts.y, outputs)
        chosen: dict[str, tuple[Any, Any, bool]] = own | compiled_metrics(self._model, parts.y, outputs)
        for name, (metric, _, _) in chosen.items():
            if not is_mean(metric):
                self.add_metric(name, metric)
                continue
            compute_in_floatx(metric)
            if metric.dtype == "float64":
                widen(metric.variables)
        return chosen
