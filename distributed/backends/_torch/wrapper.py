"""Wrap a model for training, and exchange the gradients of the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.gradients import Gradients
    from distributed.backends._torch.optimizer_state import HoldsSlots
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.several_update import SeveralUpdate
    from distributed.backends._torch.update import Update
    from distributed.backends.torch_base import TorchBackend
    from distributed.state import UpdateBatch


class Wrapper:
    """Leave the model unwrapped, as for one process. An engine overrides the steps in which it differs.

    The methods are called in this order: `build`, `wrap`, `bind`, then `backward` and `exchange` for each update, and
    finally `release`. Every rank calls every method.
    """

    def __init__(self, backend: TorchBackend[Any]) -> None:
        self._backend = backend

    def build(self, model_or_factory: Any) -> torch.nn.Module:
        """Return the user's model on this rank's device."""
        from distributed.backends._torch import modules

        own = self._backend
        return modules.build_model(model_or_factory, own.config, own.device).to(own.device)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module to call in training. Called again for each further fit, after `release`."""
        return model

    def compile(self) -> None:
        """Let torch compile the model, after `wrap`."""
        self._backend.kind.compile()

    def make_precision(self) -> Precision:
        """Return the mixed precision of a fit."""
        from distributed.backends._torch.precision import Precision

        own = self._backend
        return Precision(own.mixed_precision, own.device, own.config)

    def bind(self, optimizer: Any) -> Any:
        """Return the user's optimizer, bound to the parameters that exist after `wrap`."""
        return optimizer

    def hold(self) -> HoldsSlots | None:
        """Return an object that keeps the optimizer's state of a checkpoint. Return None if the optimizer gets it at once."""
        return None

    def make_gradients(self, parameters: list[torch.nn.Parameter]) -> Gradients:
        """Return the object that clips the gradients of `parameters` and checks them for NaN."""
        from distributed.backends._torch.gradients import Gradients

        return Gradients(parameters, self._backend.plain, self._backend.device)

    def make_update(self, optimizer: Any, schedule: Any) -> Update | SeveralUpdate:
        """Return the object that makes updates from the gradients."""
        update: Update | SeveralUpdate = self._backend.kind.update(self._backend, optimizer, schedule)
        return update

    def before_first_update(self, update_batch: UpdateBatch) -> torch.nn.Module:
        """Return the module to call from now on. Called once after each `wrap`, when the first batch is known."""
        wrapped: torch.nn.Module = self._backend.wrapped
        return wrapped

    def free_gathered(self) -> None:
        """Free copies of the weights that a forward pass left behind, before the weights change. Not a collective."""

    def outermost_gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which methods of the model, such as `generate`, may call its outermost submodules.

        An engine that shards weights gathers those that belong to no inner unit, and keeps them until the end. Entering the context
        is a collective.
        """
        return contextlib.nullcontext()

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes exchange no gradients."""
        return contextlib.nullcontext()

    def backward(self, value: torch.Tensor) -> None:
        """Add the gradients of `value`, a loss scaled for the update.

        They are exchanged unless within `without_sync`.
        """
        self._backend.precision.scaled(value).backward()

    def exchange(self) -> None:
        """Wait until the gradients of an update are averaged over all ranks. On a GPU the work may only be queued."""

    # The following methods are for several models, each with an optimizer of its own.

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, if ranks have copies of the models. Called before each update batch."""

    def backward_of(self, value: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add the gradients of `value` to `parameters`, which belong to one of the models, and to no others."""
        value.backward(inputs=list(parameters))  # type: ignore[no-untyped-call]

    def exchange_of(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Average the gradients of `parameters`, which belong to one of the models, over all ranks."""

    def after_non_finite(self) -> None:
        """Discard state kept from an update with non-finite gradients, after `nan_policy` was applied."""

    def release(self) -> None:
        """Remove the wrapper's hooks and state. The backend drops the wrapped module afterwards."""
