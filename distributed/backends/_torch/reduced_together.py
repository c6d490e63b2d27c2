"""Average the gradients of one of several models over the ranks after its backward pass.

DistributedDataParallel cannot be used: it averages the gradients of every parameter that a backward pass reaches, and the
loss of one model reaches the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distributed.backends._torch import sparse
from distributed.backends._torch.data_parallel import DDPWrapper
from distributed.errors import ConfigError
from distributed.state import UpdateBatch

_BUCKET_MB = 25.0  # the default of DistributedDataParallel


class ReducingWrapper(DDPWrapper):
    """Leave several models unwrapped, and all-reduce gradients in buckets."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        self._share([*(parameter.detach() for parameter in model.parameters()), *model.buffers()])
        return model

    def before_first_update(self, update_batch: UpdateBatch) -> torch.nn.Module:
        wrapped: torch.nn.Module = self._backend.wrapped
        return wrapped

    def exchange(self) -> None:
        """Do nothing, because `exchange_of` has exchanged the gradients of each update."""

    def share_buffers(self) -> None:
        self._share(list(self._backend.plain.buffers()))

    def exchange_of(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        world = self._backend.world
        if world.world_size == 1:
            return
        self._check_all(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        dense = [gradient for gradient in gradients if not gradient.is_sparse]
        pending = []
        for bucket in self._buckets(dense):
            flat = _joined(bucket).div_(world.world_size)
            pending.append((bucket, flat, world.combine(flat, "sum")))
        for bucket, flat, work in pending:
            work.wait()
            _split(flat, bucket)
        if len(dense) < len(gradients):
            sparse.average([p for p in parameters if p.grad is not None and p.grad.is_sparse], world)

    def _check_all(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raise ConfigError for a parameter without a gradient. Other ranks may have one."""
        lacking = next((parameter for parameter in parameters if parameter.grad is None), None)
        if lacking is not None:
            name = next(name for name, each in self._backend.plain.named_parameters() if each is lacking)
            raise ConfigError(
                f"no gradient for {name}: on several processes each update needs a gradient of every parameter of its model, so"
                " set requires_grad=False on those that the loss does not use"
            )

    def _share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all ranks the values that rank 0 has. A collective."""
        world = self._backend.world
        if world.world_size == 1:
            return
        for bucket in self._buckets(tensors):
            flat = _joined(bucket)
            world.copy_from(flat, 0)
            _split(flat, bucket)

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield buckets of tensors of one element type. The order is the same on every rank and in every update."""
        limit = (self._options.bucket_cap_mb or _BUCKET_MB) * 2**20
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            bucket: list[torch.Tensor] = []
            size = 0.0
            for tensor in tensors:
                if tensor.dtype != kind:
                    continue
                if bucket and size + tensor.nbytes > limit:
                    yield bucket
                    bucket, size = [], 0.0
                bucket.append(tensor)
                size += tensor.nbytes
            yield bucket


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the parts of `flat` into `tensors`."""
    for part, tensor in zip(torch.split(flat, [tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
