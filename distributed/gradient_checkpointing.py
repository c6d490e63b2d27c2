"""Recompute activations in scripts without `Trainer`; its setting `activation_checkpointing` belongs in `config` and `backends`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from distributed.errors import ConfigError

if TYPE_CHECKING:
    import torch


def checkpoint_scope(*modules: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context manager inside which forward passes keep no activations within `modules`::

        with checkpoint_scope():
            loss = criterion(model(batch), targets)
        loss.backward()

    The backward pass computes the activations again, even after the block. Random numbers (dropout) and autocast are
    those of the forward pass, so no result changes. `model` may be wrapped in DistributedDataParallel. This function is
    not a collective.

    Args:
        modules: the modules to recompute. If none are given: the repeated blocks (entries of a ModuleList or Sequential
            that have sub-modules) of every model that is called inside, or the modules that a Hugging Face model selects.

    Returns:
        The context manager, for one `with` statement.

    Raises:
        ConfigError: an argument is not a module, or a model without repeated blocks is called inside.
    """
    from distributed.backends._torch.recomputing import Recomputing

    return Recomputing(modules)


def memory_pool_scope() -> None:
    """Raise ConfigError, because torch's allocator is a memory pool already."""
    raise ConfigError(
        "memory_pool_scope() would do nothing: torch's allocator keeps freed memory in a pool and reuses it. Drop it; to"
        " need less memory use checkpoint_scope(), and PYTORCH_ALLOC_CONF=expandable_segments:True against fragments on GPUs"
    )
