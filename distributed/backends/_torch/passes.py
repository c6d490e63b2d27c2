"""Run the forward and backward passes of one update.

Every micro-batch is weighted by its share of the update's true count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.generators import forked
from distributed.backends._torch.nested import move
from distributed.backends._torch.non_finite_loss import shown_in_gradients
from distributed.backends.arrays import ArrayBatch
from distributed.errors import ConfigError
from distributed.state import MicroBatch, UpdateBatch

if TYPE_CHECKING:
    from distributed.backends._torch.objective import Loss, Objective
    from distributed.backends._torch.world import Pending
    from distributed.backends.torch_base import TorchBackend


class Passes:
    """Run the forward and backward passes of a fit, and the forward passes of evaluation."""

    def __init__(self, backend: TorchBackend[Any], objective: Objective) -> None:
        self._backend, self.objective = backend, objective
        self._world, self._device, self._wrapper = backend.world, backend.device, backend.wrapper
        self._num_replicas = backend.data_parallel_size
        self._is_plain = backend.mixed_precision == "no"
        self.dtype = torch.float64 if backend.config.dtype == "float64" else None
        self._moves = self._device.type != "cpu" or self.dtype is not None
        self.is_settled = False  # whether the ranks have agreed on the form of the loss
        self._total: torch.Tensor | None = None  # the count of a (sum, count) loss while it is being summed
        self._counting: Pending | None = None

    def move(self, batch: Any) -> Any:
        """Return `batch` on this rank's device, in the element type of the run and the form that the model takes."""
        batch = self._arranged(batch)
        return move(batch, self._device, self.dtype) if self._moves else batch

    def _arranged(self, batch: Any) -> Any:
        return self._backend.kind.arranged(batch) if type(batch) is ArrayBatch else batch

    def settle(self, batch: Any) -> None:
        """Agree on the form of the loss, which each rank tries out on its first batch. A collective."""
        backend = self._backend
        with forked(self._device), backend.precision.autocast():
            votes = self.objective.probe(backend.plain, self.move(batch))
        self.objective.settle(self._world.reduce(votes))
        backend.wrapped.train()
        self.is_settled = True

    def resume(self, form: Mapping[str, bool]) -> None:
        """Restore the form of the loss from a checkpoint. Settling it on another batch could give another form."""
        self.objective.form, self.is_settled = form, True

    def run(self, update_batch: UpdateBatch) -> list[Loss]:
        """Run all micro-batches of an update. Gradients are exchanged only in the last backward pass. All ranks must
        call it."""
        micros = update_batch.micro_batches
        items = self._count_items(micros) if self.objective.takes_count else None
        losses: list[Loss] = []
        if len(micros) > 1:
            with self._wrapper.without_sync():
                for micro in micros[:-1]:
                    losses.append(self._forward_backward(micro, update_batch, items, losses, False))
        losses.append(self._forward_backward(micros[-1], update_batch, items, losses, True))
        return losses

    def take_total(self) -> torch.Tensor | None:
        """Return the count of a (sum, count) loss over all ranks, as float64 of shape [1], or None without a count."""
        total, self._total = self._total, None
        if total is not None:
            assert self._counting is not None
            self._counting.wait()
        return total

    def _forward_backward(
        self, micro: MicroBatch, update_batch: UpdateBatch, items: torch.Tensor | None, done: list[Loss], is_last: bool
    ) -> Loss:
        """Run one forward and backward pass.

        The loss is scaled so that the synchronised gradient is the mean over the update's true count.
        """
        if micro.num_samples == 0:
            return self.weightless(micro, update_batch, items, done, is_last)
        loss = self._forward(micro, items, micro.num_samples)
        self.backward(loss, micro, update_batch, done, is_last, items)
        return loss

    def backward(
        self,
        loss: Loss,
        micro: MicroBatch,
        update_batch: UpdateBatch,
        done: list[Loss],
        is_last: bool,
        items: torch.Tensor | None = None,
    ) -> None:
        """Run the backward pass of a micro-batch with samples. `done` are the losses of the earlier micro-batches."""
        replicas = self._num_replicas  # the exchange averages the gradients of this many ranks
        scale: Any
        if loss.count is None:
            scale = micro.num_samples * replicas / update_batch.num_samples
        elif items is not None:
            scale = replicas / items
        else:  # the total count is not known yet: use a nominal one, corrected before clipping
            scale = replicas / update_batch.num_samples
        if is_last and loss.count is not None and items is None:
            self.start_counting([*done, loss])
        with self._watched(loss.value, number=1) as value:
            self._wrapper.backward(self._scaled(value, scale))

    def weightless(
        self, micro: MicroBatch, update_batch: UpdateBatch, items: torch.Tensor | None, done: list[Loss], is_last: bool
    ) -> Loss:
        """Run the passes of a rank without samples. They take part in every collective and change nothing."""
        with self.restoring():
            loss = self._forward(micro, items, 0)
            self.backward_weightless(loss, [] if items is not None else done, is_last=is_last and items is None)
        return loss

    def backward_weightless(self, loss: Loss, done: list[Loss], *, is_last: bool) -> None:
        """Run the backward pass of a micro-batch without samples. The loss counts nothing afterwards."""
        loss.count = None if loss.count is None else torch.zeros((), device=self._device)
        if is_last and loss.count is not None:
            self.start_counting([*done, loss])
        self._wrapper.backward(torch.nan_to_num(loss.value) * 0.0)
        loss.value = loss.value.detach() * 0.0

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore the buffers of the model and torch's generators at the end of the block."""
        buffers = [(buffer, buffer.clone()) for buffer in self._backend.plain.buffers()]
        with forked(self._device):
            yield
        for buffer, before in buffers:
            buffer.data.copy_(before)  # `data`, because autograd may still refer to the buffer

    def _forward(self, micro: MicroBatch, items: torch.Tensor | None, num_samples: int) -> Loss:
        """Run a forward pass in which the user's code logs values that weigh `num_samples`."""
        batch, model, logged = self.move(micro.batch), self._backend.wrapped, self._backend.logged
        logged.weigh(num_samples)
        if self._is_plain:
            loss = self.objective(model, batch, items)
        else:
            with self._backend.precision.autocast():
                loss = self.objective(model, batch, items)
        logged.weigh(None)
        return loss

    @contextlib.contextmanager
    def _watched(self, value: torch.Tensor, number: int | None) -> Iterator[torch.Tensor]:
        """Yield the loss for a backward pass within the block. A loss that is not finite makes gradients NaN, so that all ranks
        detect it.

        On a GPU the host does not read the loss. There, a loss that is not finite makes the gradients of `number` parameters NaN
        even if they would be zero.
        """
        if not value.requires_grad:
            raise ConfigError("the loss has no gradient: return it as a tensor, without .item(), .detach() or no_grad")
        factor: Any
        if self._device.type == "cpu":
            factor, number = math.nan, None
            if math.isfinite(value.item()):
                yield value
                return
        else:
            factor = 1.0 + 0.0 * value.detach()
        value = value * factor
        with shown_in_gradients(value, factor, number):
            yield value

    @staticmethod
    def _scaled(value: torch.Tensor, scale: Any) -> torch.Tensor:
        return value if isinstance(scale, float) and scale == 1.0 else value * scale

    def start_counting(self, losses: list[Loss]) -> None:
        """Start to sum the count of a (sum, count) loss over all ranks while the last backward pass runs."""
        counts = [loss.count for loss in losses]
        total = self._on_device(sum(counts))
        self._total, self._counting = total, self._world.combine(total, "sum")

    def _count_items(self, micros: list[MicroBatch]) -> torch.Tensor | None:
        """Return the number of labels of the whole update over all ranks, for models that divide by it.

        A collective.
        """
        counts = [self.objective.label_count(self._arranged(micro.batch)) for micro in micros if micro.num_samples]
        known = [count for count in counts if count is not None]
        total = self._on_device(sum(known))
        began = time.perf_counter()
        self._world.combine(total, "sum").wait()
        self._backend.observer.add_wait_for_count(time.perf_counter() - began)
        return total.reshape(())

    def _on_device(self, number: Any) -> torch.Tensor:
        """Return `number` as float64 of shape [1] on this rank's device. The host does not wait."""
        value = torch.as_tensor(number, dtype=torch.float64).reshape(1)
        return value.to(self._device, non_blocking=True)
