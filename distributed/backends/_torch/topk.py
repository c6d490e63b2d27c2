"""Compress gradients with top-k and error feedback: only the largest entries of each parameter's gradient are sent.

Each rank adds the entries that it did not send (its error) to its next gradient, so that they are delayed and not lost
(Stich et al., Sparsified SGD with Memory, arXiv 1809.07599). Errors are kept by parameter name, and entries are chosen
for each parameter separately. Both are therefore independent of DDP's buckets, which change after the first update and
with a new wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.backends._torch.comm_hooks import CommHook
from distributed.backends._torch.tensor_io import read_file, write_file

_ERROR = "error."


class TopK(CommHook):
    """Average the gradients of one model.

    `ratio` is the part of each parameter's gradient that is sent; None means 0.01.
    """

    has_memory = True

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]], ratio: float | None) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._ratio = ratio = 0.01 if ratio is None else ratio
        self._left_out: dict[str, torch.Tensor] = {}  # by parameter name, flat
        self.notice = f"ddp.comm_hook=topk sends {ratio:.3g} of each gradient; the rest is added to the next one"

    def average(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        indices = self._choose(buffer, [(self._names[id(p)], p.numel()) for p in bucket.parameters()])
        world = dist.get_world_size()
        # torch before 2.13 has this function under its old name. Values and indices are sent in one message, because two messages
        # could be mixed up with those of another bucket.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        mine = torch.cat([buffer[indices].view(torch.uint8), indices.to(_index_type(buffer)).view(torch.uint8)])
        everyone = mine.new_empty(world * len(mine))
        future = gather(everyone, mine, async_op=True).get_future()

        def average(done: Any) -> torch.Tensor:
            done.value()  # raises the error of the gather, which leaves `everyone` unfilled
            return _sum(everyone.view(world, -1), len(indices), buffer).div_(world)

        return future.then(average)

    def forget(self) -> None:
        self._left_out = {}

    def save(self, directory: Path, rank: int) -> dict[str, Any]:
        memory = {_ERROR + name: left for name, left in self._left_out.items()}
        write_file(directory / "comm_hook" / f"rank-{rank}.safetensors", memory, {})
        return {}

    def load(self, directory: Path, rank: int, state: Mapping[str, Any]) -> None:
        memory, _ = read_file(directory / "comm_hook" / f"rank-{rank}.safetensors")
        self._left_out = {name.removeprefix(_ERROR): left for name, left in memory.items()}

    def _choose(self, buffer: torch.Tensor, layout: list[tuple[str, int]]) -> torch.Tensor:
        """Return the indices of the entries to send.

        Add the error to `buffer` first, and keep all other entries as the new error.
        """
        sizes = [size for _, size in layout]
        chosen, start = [], 0
        for (name, size), part in zip(layout, torch.split(buffer, sizes), strict=True):
            if (left := self._left_out.get(name)) is not None:
                part.add_(left.to(part.device))
            count = max(1, round(self._ratio * size)) if size else 0
            chosen.append(torch.topk(part.abs(), count, sorted=False).indices + start)
            start += size
        indices = torch.cat(chosen)
        left_out = buffer.clone()
        left_out[indices] = 0
        for (name, _), part in zip(layout, torch.split(left_out, sizes), strict=True):
            self._left_out[name] = part
        return indices


def _index_type(buffer: torch.Tensor) -> torch.dtype:
    return torch.int32 if buffer.numel() < 2**31 else torch.int64


def _sum(rows: torch.Tensor, count: int, buffer: torch.Tensor) -> torch.Tensor:
    """Fill `buffer` with the sum of the entries that all ranks sent, added in the order of ranks, and return it. `rows`
    are the messages of the ranks, as bytes."""
    buffer.zero_()
    cut = count * buffer.element_size()
    for row in rows:
        values, indices = row[:cut].clone().view(buffer.dtype), row[cut:].clone().view(_index_type(buffer))
        buffer.index_add_(0, indices, values)
    return buffer
