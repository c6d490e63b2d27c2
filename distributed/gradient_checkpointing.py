"""Recompute activations in the backward pass, for scripts that do not use `Trainer` (which has activation_checkpointing)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from distributed.errors import ConfigError

if TYPE_CHECKING:
    import torch


def checkpoint_scope(*modules: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """A block whose forwards keep no activations within `modules`: the backward pass, also after the block, computes them again.

        with checkpoint_scope():
            loss = criterion(model(batch), targets)
        loss.backward()

    Random numbers (dropout) and autocast are those of the first time, so no result changes. `model` may be wrapped in
    DistributedDataParallel. No collective.

    Args:
        modules: what to recompute; none means the repeated blocks (entries of a ModuleList or Sequential with sub-modules of
            their own) of every model that is called in the block, or what a Hugging Face model's own switch chooses.

    Raises ConfigError for what is no module, and at the call of a model that has no repeated blocks.
    """
    from distributed.backends._torch.recomputing import Recomputing

    return Recomputing(modules)


def memory_pool_scope() -> None:
    """Refused: torch's allocator is a pool already. Raises ConfigError."""
    raise ConfigError(
        "memory_pool_scope() would do nothing: torch's allocator keeps freed memory in a pool and reuses it. Drop it; to"
        " need less memory use checkpoint_scope(), and PYTORCH_ALLOC_CONF=expandable_segments:True against fragments on GPUs"
    )
