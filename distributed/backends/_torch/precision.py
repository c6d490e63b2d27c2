"""Mixed precision at work: what the forward computes in, and the loss scaler that fp16 needs."""

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
    """`kind` is "no", "bf16" or "fp16"."""

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
        """Keep the scale where the gradients are. Between a GPU and the host torch copies it without waiting for the copy, so
        the host would divide by a number that is not there yet (`GradScaler._unscale_grads_`, torch 2.13)."""
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=device))  # the first tensor says where it lives

    def scaled(self, loss: torch.Tensor) -> Any:
        """The loss to go backward from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of a scaled loss true ones."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def updating(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """What makes one update out of true gradients."""
        scaler = self.scaler
        if scaler is None:
            return optim.lean_step(optimizer)

        def update() -> None:
            scaler.step(optimizer)
            scaler.update()

        return update

    def leave_out(self) -> None:
        """Instead of an update: the scale is lowered after an overflow."""
        if self.scaler is not None:
            self.scaler.update()

    @property
    def leaves_out(self) -> bool:
        """Whether an update with gradients that are not finite is left out by what makes the updates."""
        return self.scaler is not None

    def may_overflow(self) -> bool:
        """Whether gradients that are not finite may come from the scale alone."""
        return self.scaler is not None and self.scaler.get_scale() > MIN_LOSS_SCALE

    def state(self) -> dict[str, Any] | None:
        """What `load` takes, as JSON."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up `state`, if there is one."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))
