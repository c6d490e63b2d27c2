"""Define the module that `distributed.DistributedDataParallel` puts around a model in a Horovod world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._horovod.buckets import Buckets
from distributed.backends._torch.modules import sparse_names

if TYPE_CHECKING:
    from distributed.backends._horovod.world import HorovodWorld


class AveragedGradients(torch.nn.Module):
    """Wrap `module`: its gradients are averaged over all ranks at the end of each backward pass outside of
    `no_sync`."""

    def __init__(self, module: torch.nn.Module, world: HorovodWorld, bucket_cap_mb: float | None) -> None:
        super().__init__()
        self.module = module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._buckets = Buckets(
            world._hvd, trained, sparse=sparse_names(module), capacity_mb=bucket_cap_mb,
            on_first=self._finish_after_backward,
        )  # fmt: skip
        self._is_held = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs."""
        if torch.is_grad_enabled():
            self._buckets.is_local = self._is_held
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in the backward passes of those forward passes that run in this block."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def release(self) -> None:
        """Remove the hooks from the module."""
        self._buckets.release()

    def _finish_after_backward(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._buckets.finish)
