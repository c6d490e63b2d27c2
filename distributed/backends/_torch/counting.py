"""Count the samples, tokens and FLOPs of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from distributed.backends._torch.recomputing import is_recomputing
from distributed.callbacks import Counted
from distributed.errors import ConfigError
from distributed.state import UpdateBatch

if TYPE_CHECKING:
    from distributed.backends._torch.objective import Loss
    from distributed.backends.torch_base import TorchBackend


class Counter:
    """Run the passes of each update of a fit, and count what they work on.

    The first update also counts its FLOPs if `counts_flops`.
    """

    def __init__(self, backend: TorchBackend[Any], *, counts_flops: bool) -> None:
        self._backend, self._counts_flops = backend, counts_flops
        self._per_sample = self._per_token = 0.0
        self.counted = Counted()

    def run(self, update_batch: UpdateBatch) -> list[Loss]:
        """Run the passes and set `counted`. If FLOPs are counted, this is a collective and the host waits."""
        micros = [micro for micro in update_batch.micro_batches if micro.num_samples]
        num_samples, num_tokens = sum(m.num_samples for m in micros), sum(tokens_in(m.batch) for m in micros)
        if self._counts_flops:
            self._check(len(update_batch.micro_batches))
            with Flops() as flops:
                losses = self._backend.passes.run(update_batch)
            self._settle(flops.total, num_tokens, update_batch.num_samples)
        else:
            losses = self._backend.passes.run(update_batch)
        self.counted = Counted(num_samples, num_tokens, self._per_sample, self._per_token)
        return losses

    def _check(self, num_micro_batches: int) -> None:
        if num_micro_batches > 1 and not self._backend.kind.is_one_model:  # their forward passes run in other threads
            raise ConfigError(
                "ThroughputAndMFU cannot count the FLOPs of several models with gradient accumulation: pass flops_per_sample=..., which"
                " a run of a few steps without it shows"
            )

    def _settle(self, flops: int, num_tokens: int, num_samples: int) -> None:
        self._counts_flops = False
        total = self._backend.world.reduce({"flops": float(flops), "tokens": float(num_tokens)})
        self._per_sample = total["flops"] / num_samples
        self._per_token = total["flops"] / total["tokens"] if total["tokens"] else 0.0


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up the FLOPs of the operators that run in a block by the formulas of torch's `FlopCounterMode`.

    Workaround (torch 2.13, no upstream issue known; may go when `FlopCounterMode` leaves out forward passes that are recomputed and
    sees sharded modules): it also counts forward passes that are recomputed in a backward pass, and its hooks on modules miss
    modules that are sharded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None and not is_recomputing():
            self.total += formula(*args, **kwargs, out_val=out)
        return out


def tokens_in(batch: Any) -> int:
    """Return the number of tokens of a batch, with padding, or 0 if it holds none."""
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point():
        return ids.numel()
    return 0
