"""Let a hook call the model without any effect on training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend


@contextlib.contextmanager
def sampling(backend: TorchBackend[Any], seed: int) -> Iterator[Callable[[Any], Any]]:
    """Implement `Observed.sampling`. Entering the block is a collective."""
    model = backend.plain
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with contextlib.ExitStack() as block:
            block.enter_context(backend.generators.untouched())
            block.enter_context(backend.kind.without_draws())
            block.enter_context(backend.logged.ignoring())
            block.enter_context(backend.averaged_weights.as_validated())
            block.enter_context(torch.no_grad())
            block.enter_context(backend.precision.autocast())
            if backend.config.compile:  # each length of a text would be compiled
                block.enter_context(torch.compiler.set_stance("force_eager"))
            backend.share_buffers()
            backend.generators.seed(seed)
            backend.kind.seed(seed)
            model.eval()
            block.enter_context(backend.wrapper.outermost_gathered())
            yield backend.passes.move
    finally:
        backend.wrapper.free_gathered()
        for buffer, before in buffers:
            buffer.data.copy_(before)
        for module, was_training in modes:
            module.training = was_training
