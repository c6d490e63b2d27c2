"""Make updates from the losses of a loop that the user's script runs. The passes and the update are those of `train_step`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.objective import Loss, as_loss
from distributed.backends._torch.passes import Passes
from distributed.backends._torch.stand_in import stand_in
from distributed.errors import ConfigError
from distributed.loggers.logged import Logged
from distributed.state import MicroBatch, StepResult, UpdateBatch

if TYPE_CHECKING:
    from distributed.backends._torch.objective import Objective
    from distributed.backends.torch_base import TorchBackend


class OwnPasses(Passes):
    """Run the backward passes of a loop that calls the model itself."""

    def __init__(self, backend: TorchBackend[Any], objective: Objective) -> None:
        super().__init__(backend, objective)
        self.is_settled = True  # the form of each loss is seen when it is passed to `backward`
        self.is_learning_due = False

    def weightless(
        self, micro: MicroBatch, update_batch: UpdateBatch, items: torch.Tensor | None, done: list[Loss], is_last: bool
    ) -> Loss:
        """Record that the wrapper needs a pass with zero weight before its first update. The first call of the model runs it."""
        self.is_learning_due = True
        return Loss(torch.zeros(()), None)


class TorchOwnSteps:
    """Implement `distributed.backends.own_steps.OwnSteps` with the passes and the update of a torch adapter."""

    def __init__(self, backend: TorchBackend[Any], passes: OwnPasses) -> None:
        self._backend, self._passes = backend, passes
        self._update_batch = UpdateBatch([], 0, 0)
        self._losses: list[Loss] = []  # of the micro-batches of this update batch that have had their backward pass
        self._index: int | None = None  # the micro-batch that was entered, or None
        self._is_first = True  # whether this is the first update, in which the ranks compare the forms of their losses
        self._num_evaluated = 0  # number of evaluation batches that are entered now
        self._autocast = contextlib.ExitStack()  # see `_switch_autocast`
        self._unsynced = contextlib.ExitStack()
        self._restored = contextlib.ExitStack()
        self.own_loss = Logged(reserves=False)  # the loss that the loop logs itself

    @property
    def model(self) -> Any:
        """The user's model, whose calls go through the wrapper of the backend."""
        return stand_in(self._backend.plain, __call__=lambda _, *args, **kwargs: self._call(args, kwargs))

    @property
    def optimizer(self) -> Any:
        """The optimizer, whose `step` and `zero_grad` refuse to be called."""

        def refuse(name: str) -> Any:
            def refused(*args: Any, **kwargs: Any) -> Any:
                raise ConfigError(
                    f"optimizer.{name}() is part of update(): drop it, and call update() after backward(loss)"
                )

            return refused

        return stand_in(self._backend.users_optimizer, step=refuse("step"), zero_grad=refuse("zero_grad"))

    # ------------------------------------------------------------------ training

    def begin(self, update_batch: UpdateBatch) -> None:
        """Begin an update. A collective."""
        self._update_batch, self._losses = update_batch, []
        self._backend.begin_update(update_batch)

    def enter(self, index: int) -> Any:
        """Enter micro-batch `index`, and return its batch on the device. Not a collective."""
        micro = self._update_batch.micro_batches[index]
        self._index = index
        self._weigh(micro.num_samples)
        if not micro.num_samples:
            self._restored.enter_context(self._passes.restoring())
        if not self._is_last:
            self._unsynced.enter_context(self._backend.wrapper.without_sync())
        self._switch_autocast()
        return self._passes.move(micro.batch)

    def leave(self) -> None:
        """Leave the micro-batch that was entered, if there is one. Not a collective."""
        for open_ in (self._autocast, self._unsynced, self._restored):
            open_.close()
        self._weigh(None)
        self._index = None

    @property
    def is_owed(self) -> bool:
        """Return whether the micro-batch that was entered has had no backward pass."""
        return self._index is not None and len(self._losses) <= self._index

    @property
    def is_complete(self) -> bool:
        """Return whether all micro-batches of the update batch have had their backward passes."""
        return len(self._losses) == len(self._update_batch.micro_batches)

    def backward(self, value: Any) -> None:
        """Run the backward pass of the micro-batch that was entered. A collective."""
        if self._index is None:
            raise ConfigError(
                "backward(loss) belongs in the loop over the training loader: call it once for each batch"
            )
        if not self.is_owed:
            raise ConfigError("backward() was called twice for one batch: add the losses, and call backward(sum) once")
        micro, loss = self._update_batch.micro_batches[self._index], as_loss(value)
        self._check_form(loss)
        self._autocast.close()
        if micro.num_samples:
            self._passes.backward(loss, micro, self._update_batch, self._losses, self._is_last)
            loss.value = loss.value.detach()
        else:
            self._passes.backward_weightless(loss, self._losses, is_last=self._is_last)
        self._backend.logged.weigh(micro.num_samples)  # recomputing activations has reset it
        self._unsynced.close()
        self._restored.close()
        self._losses.append(loss)

    def _weigh(self, num_samples: int | None) -> None:
        self._backend.logged.weigh(num_samples)
        self.own_loss.weigh(num_samples)

    def finish(self) -> StepResult:
        """Make the update. A collective."""
        return self._backend.end_update(self._update_batch, self._losses)

    def report_own_loss(self, result: StepResult) -> None:
        """Replace the loss in `result` by the one in `own_loss`, if the loop has logged one."""
        if self.own_loss.is_pending:
            own = StepResult([])
            self.own_loss.attach(own)
            result.averages = [*(each for each in result.averages if each[0] != "loss"), *own.averages]

    @property
    def _is_last(self) -> bool:
        return self._index == len(self._update_batch.micro_batches) - 1

    def _check_form(self, loss: Loss) -> None:
        """Raise ConfigError if losses have different forms, in one update or on the ranks of the first one."""
        is_mean = loss.count is None
        forms = {is_mean, *(each.count is None for each in self._losses)}
        if self._is_first and self._is_last:
            self._is_first = False
            forms.update(self._backend.world.gather(is_mean))
        if len(forms) > 1:
            raise ConfigError(
                "backward() got a mean over samples and a pair (sum, count) in one update: use one of these forms"
            )

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        own = self._backend
        if self.is_owed and torch.is_grad_enabled():
            if self._passes.is_learning_due:
                self._learn(args, kwargs)
            return own.wrapped(*args, **kwargs)
        # Outside of a training step, call the plain model: a wrapper may wait for a backward pass, or broadcast buffers.
        with own.precision.autocast():
            return own.plain(*args, **kwargs)

    def _learn(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run a pass with zero weight, in which a new wrapper learns the order of the gradients. A collective."""
        own, self._passes.is_learning_due = self._backend, False
        is_unsynced = not self._is_last
        self._unsynced.close()
        gradients = [parameter.grad for parameter in own.update.parameters]
        with self._passes.restoring(), own.kind.without_draws():
            outputs = _tensors(own.wrapped(*args, **kwargs))
            total: Any = sum(torch.nan_to_num(each).sum() for each in outputs if each.requires_grad)
            with torch.autocast(own.device.type, enabled=False):
                own.wrapper.backward(total * 0.0)
        for parameter, gradient in zip(own.update.parameters, gradients, strict=True):
            parameter.grad = gradient
        if is_unsynced:
            self._unsynced.enter_context(own.wrapper.without_sync())

    # ------------------------------------------------------------------ evaluation

    def begin_evaluation(self) -> None:
        """Give all ranks the buffers of rank 0, with which they evaluate. A collective."""
        self._backend.share_buffers()

    @contextlib.contextmanager
    def evaluating(self, micro: MicroBatch) -> Iterator[Any]:
        """Yield the batch of `micro` on the device, for an evaluation within the block. Not a collective."""
        self._num_evaluated += 1
        self._switch_autocast()
        try:
            yield self._passes.move(micro.batch)
        finally:
            self._num_evaluated -= 1
            self._switch_autocast()

    def _switch_autocast(self) -> None:
        """Switch autocast on if there is a batch of evaluation, or one that waits for its backward pass, else off."""
        self._autocast.close()
        if self._num_evaluated or self.is_owed:
            self._autocast.enter_context(self._backend.precision.autocast())

    def gather(self, tensor: Any, num_samples: int | None) -> torch.Tensor:
        """Return the rows of all ranks as one tensor on this rank's device. A collective.

        If `num_samples` is given, `tensor` belongs to a batch of which this rank has that many samples. The rows are then in the
        order of the samples, and each sample occurs once. Otherwise the rows are ordered by rank.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"gather() got a {type(tensor).__name__}: pass a tensor")
        mine = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        if num_samples == 0:
            mine = mine[:0]
        parts: list[torch.Tensor] = self._backend.world.gather(mine.cpu())
        joined = torch.cat(parts)
        if num_samples is not None and tensor.dim():
            order = torch.cat([torch.arange(len(each)) * len(parts) + rank for rank, each in enumerate(parts)])
            joined = joined[order.argsort()]
        return joined.to(self._backend.device)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the outputs of a model."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", value))
    found = [value] if isinstance(value, torch.Tensor) else leaves
    return [each for each in found if isinstance(each, torch.Tensor)]
