"""Exchange gradients during the backward pass: each bucket is all-reduced once its last gradient is computed.

`hvd.DistributedOptimizer` is not used: it sends each parameter by itself, and Horovod fuses the parameters that
happen to be ready together. With three or more processes the order of summation then differs between runs. The buckets
of this module are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distributed.backends._horovod.exchange import Reduction, finished
from distributed.backends._torch.sparse import sparse_tensor
from distributed.errors import ConfigError

CAPACITY_MB = 25.0  # size of a bucket; the same as the default of torch's DDP
_ON_WIRE = (torch.float32, torch.float64, torch.float16)


class Buckets:
    """Average the gradients of `parameters` over all ranks, in place. `finish` completes the average.

    A gradient that is missing on a rank counts as zero; one that is missing on all ranks stays missing. Gradients of
    embeddings with `sparse=True` stay sparse.

    Args:
        parameters: parameters that require a gradient, by name, in the same order on all ranks.
        sparse: names of the parameters with sparse gradients.
        is_compressed: send gradients as float16.
        is_adasum: combine by Adasum (arXiv 2006.02924), parameter by parameter, instead of averaging.
        capacity_mb: size of a bucket in MB.
        on_first: called at the first gradient of a backward pass.
    """

    def __init__(
        self,
        hvd: Any,
        parameters: dict[str, torch.nn.Parameter],
        *,
        sparse: frozenset[str] = frozenset(),
        is_compressed: bool = False,
        is_adasum: bool = False,
        capacity_mb: float | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        self._hvd, self._is_compressed = hvd, is_compressed
        self._operation = hvd.Adasum if is_adasum else hvd.Average
        self._on_first = on_first
        self.is_local = False  # if True, gradients are not exchanged
        self._sparse = {name: p for name, p in parameters.items() if name in sparse}
        dense = [p for name, p in parameters.items() if name not in sparse]
        capacity = 0.0 if is_adasum else (capacity_mb or CAPACITY_MB) * 2**20
        self._buckets = [_Bucket(part, has_flags=not is_adasum) for part in _parts(dense, capacity)]
        self._is_begun = False
        names = {p: name for name, p in parameters.items()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._make_hook(number, bucket, names[p]))  # type: ignore[no-untyped-call]
            for number, bucket in enumerate(self._buckets)
            for p in bucket.parameters
        ]

    def finish(self) -> None:
        """Send the remaining buckets and wait for all buckets. A collective: all ranks call it after the backward
        pass."""
        self._is_begun = False
        for number, bucket in enumerate(self._buckets):
            if bucket.pending is None:
                self._send(number, bucket)
        sparse = [(p, self._send_sparse(name, p)) for name, p in self._sparse.items()]
        for bucket in self._buckets:
            bucket.take()
        for p, result in sparse:
            p.grad = result()

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, number: int, bucket: _Bucket, name: str) -> Callable[[torch.Tensor], None]:
        """Return the hook that marks a gradient as ready and sends the bucket when all its gradients are."""

        def hook(parameter: torch.Tensor) -> None:
            if self.is_local:
                return
            if bucket.pending is not None:  # the bucket has been sent already, so this gradient would be lost
                raise ConfigError(
                    f"{name} got a second gradient in one backward pass, as happens if parts that share it are recomputed with"
                    " use_reentrant=True: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            if not self._is_begun:
                self._is_begun = True
                if self._on_first is not None:
                    self._on_first()
            bucket.ready.add(id(parameter))
            if len(bucket.ready) == len(bucket.parameters) and bucket.pending is None:
                self._send(number, bucket)

        return hook

    def _send(self, number: int, bucket: _Bucket) -> None:
        bucket.fill()
        flat = bucket.flat
        wire = flat.half() if self._is_compressed else flat
        handle = self._hvd.allreduce_async_(wire, op=self._operation, name=f"gradients.{number}")

        def unpack() -> None:
            if wire is not flat:
                flat.copy_(wire)

        bucket.pending = Reduction(self._hvd, handle, unpack)

    def _send_sparse(self, name: str, parameter: torch.nn.Parameter) -> Callable[[], torch.Tensor]:
        """Start to gather the rows of a sparse gradient. Return a function that waits and returns the average."""
        grad = parameter.grad
        if grad is None:
            empty = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            grad = sparse_tensor(empty, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)
        grad = grad.coalesce()
        indices = self._hvd.allgather_async(grad.indices().t().contiguous(), name=f"indices.{name}")
        values = self._hvd.allgather_async(grad.values(), name=f"values.{name}")

        def result() -> torch.Tensor:
            summed = finished(self._hvd, values) / self._hvd.size()
            return sparse_tensor(finished(self._hvd, indices).t(), summed, parameter.shape).coalesce()

        return result


class _Bucket:
    """Hold several gradients in one tensor: the gradients one after the other, then a flag for each, 1 if it exists, else 0."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, has_flags: bool) -> None:
        self.parameters, self._has_flags = parameters, has_flags
        first = parameters[0]
        sizes = [p.numel() * (1 + p.is_complex()) for p in parameters]
        kind = _wire_type(first)
        self.flat = torch.zeros(sum(sizes) + has_flags * len(parameters), dtype=kind, device=first.device)
        self._views = list(torch.split(self.flat[: sum(sizes)], sizes))
        self._flags = self.flat[sum(sizes) :]
        self.ready: set[int] = set()
        self.pending: Reduction | None = None

    def fill(self) -> None:
        """Copy the gradients into the tensor, and zeros for missing gradients."""
        for index, (p, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if self._has_flags:
                self._flags[index] = float(p.grad is not None)
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(_real(p.grad).reshape(-1))

    def take(self) -> None:
        """Wait for the result, and give each parameter its part."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        self.ready.clear()
        flags = self._flags.tolist() if self._has_flags else [1.0] * len(self.parameters)
        for p, view, is_there in zip(self.parameters, self._views, flags, strict=True):
            p.grad = _like(view, p) if is_there else None


def _parts(parameters: Sequence[torch.nn.Parameter], capacity: float) -> list[list[torch.nn.Parameter]]:
    """Split the parameters into buckets of one type and device, in the order in which gradients are computed: the last
    layer first."""
    parts: dict[Any, list[list[torch.nn.Parameter]]] = {}
    filled: dict[Any, float] = {}
    for p in reversed(parameters):
        kind, size = (_wire_type(p), p.device), p.numel() * p.element_size()
        if kind not in parts or filled[kind] + size > capacity:
            parts.setdefault(kind, []).append([])
            filled[kind] = 0.0
        parts[kind][-1].append(p)
        filled[kind] += size
    return [part for several in parts.values() for part in several]


def _wire_type(parameter: torch.nn.Parameter) -> torch.dtype:
    """Return the type in which a gradient is sent: its own type, or float32 if Horovod cannot add that type.

    Workaround (Horovod 0.28.1, horovod/horovod#4047; may go when Horovod adds bfloat16): it cannot add bfloat16, for
    example.
    """
    kind = torch.view_as_real(parameter.detach()).dtype if parameter.is_complex() else parameter.dtype
    return kind if kind in _ON_WIRE else torch.float32


def _real(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _like(view: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a part of a bucket as a gradient for `parameter`. The gradient shares memory with the bucket if both have
    the same type."""
    if parameter.is_complex():
        return torch.view_as_complex(view.view(*parameter.shape, 2)).to(parameter.dtype)
    return view.view(parameter.shape).to(parameter.dtype)
