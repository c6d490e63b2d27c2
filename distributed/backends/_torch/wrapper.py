"""What an engine puts around a model for training, and how the gradients of the ranks come together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.gradients import Gradients
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.update import Update
    from distributed.backends.torch_base import TorchBackend
    from distributed.state import Group


class Wrapper:
    """Put nothing around the model, as for one process. An engine overrides the steps in which it differs.

    The order is that of training: `build`, `wrap`, `bind`, then for each update `backward` and `exchange`, at last `release`.
    Every rank calls every method.
    """

    def __init__(self, backend: TorchBackend[Any]) -> None:
        self._backend = backend

    def build(self, given: Any) -> torch.nn.Module:
        """Return the user's model on this rank's device."""
        from distributed.backends._torch import modules

        own = self._backend
        return modules.build_model(given, own.config, own.device).to(own.device)

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
        """Return the user's optimizer around the parameters that `wrap` left."""
        return optimizer

    def make_gradients(self, parameters: list[torch.nn.Parameter]) -> Gradients:
        """Return what clips the gradients of `parameters` and looks for NaN in them."""
        from distributed.backends._torch.gradients import Gradients

        return Gradients(parameters, self._backend.plain, self._backend.device)

    def make_update(self, optimizer: Any, schedule: Any) -> Update:
        """Return what makes an update out of the gradients."""
        from distributed.backends._torch.update import Update

        return Update(self._backend, optimizer, schedule)

    def before_first_update(self, group: Group) -> torch.nn.Module:
        """Return the module to call from now on. Called once after each `wrap`, when the first batch is known."""
        wrapped: torch.nn.Module = self._backend.wrapped
        return wrapped

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which backward passes exchange no gradients."""
        return contextlib.nullcontext()

    def backward(self, value: torch.Tensor) -> None:
        """Add the gradients of `value`, a loss that is scaled for the update. They are exchanged outside of `without_sync`."""
        self._backend.precision.scaled(value).backward()

    def exchange(self) -> None:
        """Return when the gradients of an update are those of all ranks, in the order of the device's work."""

    def after_non_finite(self) -> None:
        """Forget what was kept from an update whose gradients are not finite, once `nan_policy` was applied."""

    def release(self) -> None:
        """Let go of what is around the model. The backend drops the wrapped module afterwards."""
