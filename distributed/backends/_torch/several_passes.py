"""Run the passes and the updates of one update batch of several models.

With gradient accumulation, all micro-batches run up to the same call of `update`. The model is updated then, and the
micro-batches run on to the next call. The numbers are therefore those of one large batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.in_turns import Call, Suspended
from distributed.backends._torch.objective import Loss, as_loss
from distributed.backends._torch.passes import Passes
from distributed.backends._torch.several_models import SeveralModels
from distributed.backends._torch.several_objective import SeveralObjective, StepLosses
from distributed.backends._torch.several_update import MemberUpdate, SeveralUpdate
from distributed.errors import ConfigError, nearest
from distributed.state import MicroBatch, StepResult, UpdateBatch

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend


class SeveralPasses(Passes):
    """Run training_step on each micro-batch, and make the updates that it asks for."""

    objective: SeveralObjective

    def __init__(self, backend: TorchBackend[Any], objective: SeveralObjective) -> None:
        super().__init__(backend, objective)
        assert isinstance(backend.update, SeveralUpdate)
        self._members = backend.update.members
        self.is_settled = True  # the form of each loss is seen when it is passed to `update`
        self._is_first = True  # whether this is the first update batch, in which the ranks compare their calls
        self._update_batch = UpdateBatch([], 0, 0)
        self._losses: list[StepLosses] = []  # for each micro-batch
        self._of_call: list[Loss] = []  # of the current call of `update`, for each micro-batch so far
        self._num_calls = 0

    def run(self, update_batch: UpdateBatch) -> list[Loss]:
        micros = update_batch.micro_batches
        self._update_batch, self._num_calls = update_batch, 0
        self._losses = [StepLosses() for _ in micros]
        self._wrapper.share_buffers()
        returned = [self._alone(micros[0])] if len(micros) == 1 else self._in_turns(micros)
        if self._is_first:
            self._end_first()
        done = zip(micros, self._losses, returned, strict=True)
        return [losses.joined(each, micro.num_samples) for micro, losses, each in done]

    def _alone(self, micro: MicroBatch) -> Any:
        with self._turn_of(micro):
            return self._step(micro, functools.partial(self._take, 0))

    def _in_turns(self, micros: list[MicroBatch]) -> list[Any]:
        with ThreadPoolExecutor(len(micros)) as pool:
            default = torch.get_default_device()  # of this thread
            steps = [Suspended(pool, functools.partial(self._in_thread, default, micro)) for micro in micros]
            try:
                while self._advance(steps, micros):
                    pass
            finally:
                for step in steps:
                    step.abandon()
            return [step.result() for step in steps]

    def _advance(self, steps: list[Suspended], micros: list[MicroBatch]) -> bool:
        """Run every micro-batch up to its next call of `update`, and make that update. Return whether there was a call."""
        name: str | None = None
        for index, (step, micro) in enumerate(zip(steps, micros, strict=True)):
            with self._turn_of(micro):
                call: Call | None = step.advance()
            own = None if call is None else call[0]
            if index and own != name:
                raise ConfigError(
                    f"training_step called {_in_words(name)} for one micro-batch and {_in_words(own)} for another: every"
                    " micro-batch must make the same calls of update()"
                )
            name = own
            if call is not None:
                self._take(index, *call)
        return name is not None

    def _in_thread(self, default: torch.device, micro: MicroBatch, update: Any) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device of its own
        with contextlib.nullcontext() if default == torch.get_default_device() else default:
            return self._step(micro, update)

    def _step(self, micro: MicroBatch, update: Any) -> Any:
        batch, models = self.move(micro.batch), self._backend.wrapped
        if self._is_plain:
            return self.objective.run(models, batch, update)
        with self._backend.precision.autocast():
            return self.objective.run(models, batch, update)

    @contextlib.contextmanager
    def _turn_of(self, micro: MicroBatch) -> Iterator[None]:
        """Weight the values that the user's code logs by the number of samples of the micro-batch.

        A micro-batch without samples takes part in every collective. Restore generators and buffers after it.
        """
        whole = contextlib.nullcontext() if micro.num_samples else self.restoring()
        with self._logging(micro.num_samples), whole:
            yield

    @contextlib.contextmanager
    def _logging(self, num_samples: int | None) -> Iterator[None]:
        logged = self._backend.logged
        before = logged.num_samples
        logged.weigh(num_samples)
        try:
            yield
        finally:
            logged.weigh(before)

    # ------------------------------------------------------------------ one call of update(name, loss)

    def _take(self, index: int, name: str, value: Any) -> None:
        """Run the backward pass of a call for micro-batch `index`. After the last one, make the update. A collective."""
        with self._logging(None), self._without_autocast():
            self._take_outside(index, name, value)
        torch.clear_autocast_cache()  # autocast caches casts of the weights, which the update has changed

    def _take_outside(self, index: int, name: str, value: Any) -> None:
        """Do the work of `_take`. Called outside of the user's autocast, where each logged value counts once."""
        member = self._member(name)
        micro, is_last = self._update_batch.micro_batches[index], index + 1 == len(self._losses)
        if index == 0:
            self._of_call, self._num_calls = [], self._num_calls + 1
            for parameter in member.parameters:
                parameter.grad = None
        loss = as_loss(value)
        if micro.num_samples == 0 and loss.count is not None:
            loss.count = torch.zeros((), device=self._device)
        self._of_call.append(loss)
        if is_last and self._is_first:
            self._compare(name, is_mean=loss.count is None)
        if is_last and loss.count is not None:
            self.start_counting(self._of_call)
        self._backward(member, loss, micro)
        self._losses[index].add(name, loss)
        if is_last:
            self._update(name, member)
            self._backend.enter_training()  # a hook may have evaluated

    def _backward(self, member: MemberUpdate, loss: Loss, micro: MicroBatch) -> None:
        if micro.num_samples:
            samples = micro.num_samples if loss.count is None else 1  # a nominal count, corrected before clipping
            scale = samples * self._num_replicas / self._update_batch.num_samples
            with self._watched(loss.value, number=None) as value:
                self._wrapper.backward_of(member.scaled(self._scaled(value, scale)), member.parameters)
            loss.value = loss.value.detach()
        else:
            value = torch.nan_to_num(loss.value) * 0.0
            loss.value = torch.zeros_like(loss.value.detach())
            self._wrapper.backward_of(member.scaled(value), member.parameters)

    def _update(self, name: str, member: MemberUpdate) -> None:
        if all(parameter.grad is None for parameter in member.parameters):
            raise ConfigError(
                f"the loss of update({name!r}, ...) does not depend on the model {name!r}: compute it from models[{name!r}](...)"
            )
        self._wrapper.exchange_of(member.parameters)
        member.finish(self._update_batch, self._of_call, StepResult([], self._update_batch.num_samples))

    def _without_autocast(self) -> contextlib.AbstractContextManager[Any]:
        kind = self._device.type
        is_on = not self._is_plain or torch.is_autocast_enabled(kind)  # training_step may use autocast itself
        return torch.autocast(kind, enabled=False) if is_on else contextlib.nullcontext()

    def _member(self, name: str) -> MemberUpdate:
        if name in self._members:
            return self._members[name]
        models = self._backend.plain
        if isinstance(models, SeveralModels) and name in models:
            raise ConfigError(f"update({name!r}, ...): the model {name!r} is not trained: give it an optimizer")
        raise ConfigError(f"update({name!r}, ...) names no model{nearest(str(name), self._members)}")

    # ------------------------------------------------------------------ the first update batch

    def _compare(self, name: str | None, *, is_mean: bool = True) -> None:
        """Raise ConfigError if the ranks call `update` for different models, or with losses of two forms. A collective."""
        for rank, (other, is_others_mean) in enumerate(self._world.gather((name, is_mean))):
            if other != name:
                raise ConfigError(
                    f"training_step called {_in_words(name)} on rank {self._world.rank} and {_in_words(other)} on rank {rank}:"
                    " every rank must make the same calls of update()"
                )
            if is_others_mean != is_mean:
                raise ConfigError(
                    f"{_in_words(name)} got a mean over samples on one rank and a pair (sum, count) on another (ranks"
                    f" {self._world.rank} and {rank}): use one of these forms"
                )

    def _end_first(self) -> None:
        self._compare(None)
        self._is_first = False
        if not self._num_calls:
            raise ConfigError(
                "training_step never called update(): call update(NAME, loss) for each model that it trains"
            )


def _in_words(name: str | None) -> str:
    return "no further update" if name is None else f"update({name!r}, ...)"
