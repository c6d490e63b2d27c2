"""Run the forward pass in mixed precision and scale the loss for fp16."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distributed.backends._torch import optim
from distributed.config.settings import DistributedConfig

MIN_LOSS_SCALE = 2.0**-20


class Precision:
    """Hold the autocast context and the loss scaler. `kind` is "no", "bf16" or "fp16"."""

    def __init__(self, kind: str, device: torch.device, config: DistributedConfig) -> None:
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if kind != "no":
            dtype = torch.float16 if kind == "fp16" else torch.bfloat16
            self.autocast = functools.partial(torch.autocast, device.type, dtype)
        self.scaler: torch.amp.GradScaler | None = None
        if kind == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.type, init_scale=config.scaler_init_scale, growth_interval=config.scaler_growth_interval
            )

    def keep_scale_on(self, device: torch.device) -> None:
        """Keep the scale on the device of the gradients.

        Workaround (torch 2.13, pytorch/pytorch#176429 for ShardedGradScaler; may go when `GradScaler` waits for the copy):
        torch copies the scale between a GPU and the host without waiting, so the host could divide by a value that has
        not arrived.
        """
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=device))  # the first tensor decides where the scale is kept

    def scaled(self, loss: torch.Tensor) -> Any:
        """Return the loss to run the backward pass on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, in place."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def updating(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """Return a function that makes one update from unscaled gradients."""
        scaler = self.scaler
        if scaler is None:
            return optim.lean_step(optimizer)

        def update() -> None:
            scaler.step(optimizer)
            scaler.update()

        return update

    def has_found_overflow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `unscale` has found a gradient that is not finite, so that the update function makes no update."""
        if self.scaler is None:
            return False
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(float(each) for each in found.values())

    def leave_out(self) -> None:
        """Lower the scale after an overflow, in place of an update."""
        if self.scaler is not None:
            self.scaler.update()

    @property
    def leaves_out(self) -> bool:
        """Return whether the update function skips updates with non-finite gradients."""
        return self.scaler is not None

    def may_overflow(self) -> bool:
        """Return whether the scale alone may have caused non-finite gradients."""
        return self.scaler is not None and self.scaler.get_scale() > MIN_LOSS_SCALE

    def state(self) -> dict[str, Any] | None:
        """Return the state that `load` takes, as JSON."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state`, if there is one."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
