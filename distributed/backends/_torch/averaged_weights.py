"""Keep averaged weights beside the trained ones, as pieces of the same shape on the same device."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.sharding import local
from distributed.checkpoints.shards import AVERAGED

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend


class AveragedTensors:
    """Implement `distributed.callbacks.AveragedWeights` for torch parameters. Frozen parameters are not averaged."""

    def __init__(self, backend: TorchBackend[Any]) -> None:
        self._backend = backend
        self._trained: list[torch.Tensor] = []  # this rank's part of each parameter
        self._averaged: list[torch.Tensor] = []
        self._is_used = False  # whether a callback averages the weights in this process
        self._has_begun = False  # whether the averaged weights are more than a copy of the first ones
        self._is_shown = False

    def start(self) -> None:
        self._is_used = True
        self._allocate()

    def update(self, weight: float) -> None:
        self._has_begun = True
        torch._foreach_lerp_(self._averaged, self._trained, weight)

    def show(self) -> None:
        if not self._is_shown:
            self._exchange()

    def hide(self) -> None:
        if self._is_shown:
            self._exchange()

    def as_validated(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model has the averaged weights, if there are some, as in a validation."""
        return self._shown() if self._is_used and self._has_begun else contextlib.nullcontext()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Give the model the trained weights within the block."""
        was_shown = self._is_shown
        self.hide()
        yield
        if was_shown:
            self.show()

    def save(self, directory: Path) -> None:
        """Write the averaged weights into the staged checkpoint `directory`, if there are any. A collective."""
        if self._is_used and self._has_begun:
            with self._shown():
                self._backend.kind.save_model(directory / AVERAGED)

    def load(self, directory: Path, left_out: Collection[str]) -> None:
        """Load what `save` wrote into the checkpoint `directory`, which lacks the parameters `left_out`. A collective."""
        self._averaged = []
        self._has_begun = (directory / AVERAGED).is_dir()
        if self._has_begun:
            self._allocate()
            with self._shown():
                self._backend.kind.load_model(directory / AVERAGED, left_out)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        was_shown = self._is_shown
        self.show()
        try:
            yield
        finally:
            if not was_shown:
                self.hide()

    def _allocate(self) -> None:
        if not self._averaged:
            self._trained = [local(p).detach() for p in self._backend.plain.parameters() if p.requires_grad]
            self._averaged = [tensor.clone() for tensor in self._trained]

    @torch.no_grad()
    def _exchange(self) -> None:
        self._backend.wrapper.free_gathered()
        for trained, averaged in zip(self._trained, self._averaged, strict=True):
            kept = trained.clone()
            trained.copy_(averaged)
            averaged.copy_(kept)
        self._is_shown = not self._is_shown
