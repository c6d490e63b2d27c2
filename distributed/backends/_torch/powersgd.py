"""Compress gradients with PowerSGD whose state survives new buckets, a new wrapper and a resume.

torch's hook keeps two things between updates: each rank's error, which the compression has left out so far, and the
factors that the next compression starts from. Both are flat tensors in the order of a bucket's parameters. DDP
reorders its bucket after the first update, so they are kept here by parameter name. See Vogels et al., PowerSGD,
arXiv 1905.13727.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from distributed.backends._torch.comm_hooks import CommHook
from distributed.backends._torch.tensor_io import read_file, write_file

_ERROR, _FACTOR = "error.", "factor."


class PowerSGD(CommHook):
    """Run torch's PowerSGD hook for one model, whose gradients are all in one bucket.

    `rank` and `start_step` are those of the options; None selects torch's defaults. `num_updates` also counts updates
    before a resume.
    """

    has_memory = True

    def __init__(
        self, parameters: list[tuple[str, torch.nn.Parameter]], rank: int | None, start_step: int | None
    ) -> None:
        options = {"matrix_approximation_rank": rank, "start_powerSGD_iter": start_step}
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._names = {id(parameter): name for name, parameter in parameters}
        self._memory: dict[str, torch.Tensor] = {}  # flat `error.NAME` and `factor.NAME`, while no bucket holds them
        self._start()
        first = int(self._state.start_powerSGD_iter) + 1
        self.notice = f"ddp.comm_hook=powersgd compresses from update {first} on; gradients are whole before"

    def _start(self, num_updates: int = 0) -> None:
        self._state = powerSGD_hook.PowerSGDState(process_group=None, **self._options)
        self._state.iter = num_updates
        self._layout: list[tuple[str, torch.Size]] = []

    @property
    def num_updates(self) -> int:
        return int(self._state.iter)

    def average(self, bucket: Any) -> Any:
        layout = [(self._names[id(p)], p.shape) for p in bucket.parameters()]
        if layout != self._layout:
            self._memory = self.memory()
            self._start(self.num_updates)
            self._layout = layout
            self._fill(bucket.buffer())
        return powerSGD_hook.powerSGD_hook(self._state, bucket)

    def forget(self) -> None:
        self._memory = {}
        self._start(self.num_updates)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the state kept between updates, by parameter."""
        kept = dict(self._memory)
        if 0 not in self._state.error_dict:
            return kept
        names = [name for name, _ in self._layout]
        sizes = [shape.numel() for _, shape in self._layout]
        kept |= _cut(_ERROR, names, sizes, self._state.error_dict[0])
        matrices = self._matrices()
        kept |= _cut(_FACTOR, list(matrices), [q for _, q in matrices.values()], self._state.q_memory_dict[0])
        return kept

    def save(self, directory: Path, rank: int) -> dict[str, Any]:
        write_file(directory / "comm_hook" / f"rank-{rank}.safetensors", self.memory(), {})
        return {"num_updates": self.num_updates}

    def load(self, directory: Path, rank: int, state: Mapping[str, Any]) -> None:
        self._memory, _ = read_file(directory / "comm_hook" / f"rank-{rank}.safetensors")
        self._start(int(state["num_updates"]))

    def _fill(self, buffer: torch.Tensor) -> None:
        """Copy the state into flat tensors in the order of the bucket, if there is state for all of its parameters."""
        matrices = self._matrices()
        errors = [self._memory.get(_ERROR + name) for name, _ in self._layout]
        factors = [self._memory.get(_FACTOR + name) for name in matrices]
        if not errors or any(kept is None for kept in (*errors, *factors)):
            return
        self._memory = {}
        self._state.error_dict[0] = torch.cat([e for e in errors if e is not None]).to(buffer)
        factor = torch.cat([f for f in factors if f is not None]) if factors else buffer.new_empty(0)
        self._state.q_memory_dict[0] = factor.to(buffer)
        self._state.p_memory_dict[0] = buffer.new_empty(sum(p for p, _ in matrices.values()))

    def _matrices(self) -> dict[str, tuple[int, int]]:
        """Return name -> sizes of the two factors of each compressed parameter, ordered by shape as in torch's hook."""
        by_shape: dict[tuple[int, int], list[str]] = {}
        most, least = self._state.matrix_approximation_rank, self._state.min_compression_rate
        for name, shape in self._layout:
            rows = shape[0] if shape else 1
            columns = shape.numel() // rows if rows else 0
            rank = min(rows, columns, most)
            if powerSGD_hook._should_compress(rows, columns, rank, least)[0]:  # type: ignore[no-untyped-call]
                by_shape.setdefault((rows, columns), []).append(name)
        return {
            name: (n * min(n, m, most), m * min(n, m, most)) for (n, m), names in by_shape.items() for name in names
        }


def _cut(prefix: str, names: list[str], sizes: list[int], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {prefix + name: part.clone() for name, part in zip(names, torch.split(flat, sizes), strict=True)}
