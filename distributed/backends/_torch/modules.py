"""The user's model: built, changed for training, and its parts whose output depends on more than one sample."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from distributed.backends._torch.generators import forked, seed_torch
from distributed.config import DistributedConfig
from distributed.errors import ConfigError


def build_model(given: Any, config: DistributedConfig, device: torch.device) -> torch.nn.Module:
    """The module that was given, or what the given factory makes of the seed; in `dtype`. `device` may be drawn on."""
    model = given
    if not isinstance(given, torch.nn.Module):
        with forked(device):
            seed_torch(config.seed, device)
            model = given()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model factory returned a {type(model).__name__}: return a torch.nn.Module")
    return model.double() if config.dtype == "float64" else model


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost entries of a ModuleList or Sequential that have sub-modules of their own: a network's layers."""
    blocks = [
        block
        for container in model.modules()
        if isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        for block in container
        if any(True for _ in block.children()) and any(True for _ in block.parameters())
    ]
    return [b for b in blocks if not any(b is not other and _contains(other, b) for other in blocks)]


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Recompute the activations of the model's repeated blocks in the backward pass. Returns how many blocks.

    A Hugging Face model brings its own switch. Names in `state_dict` do not change.
    """
    own = getattr(model, "gradient_checkpointing_enable", None)
    if own is not None:
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 1
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            "activation_checkpointing=True found no repeated block (a ModuleList or Sequential of modules with sub-modules):"
            " use torch.utils.checkpoint in the model's forward, or drop it"
        )
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward)
    return len(blocks)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _contains(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def compile_calls(model: torch.nn.Module) -> None:
    """`model.compile()` that works for every model: torch's own compiles nothing of a bare Sequential or Linear.

    Dynamo skips frames of files in torch.nn, so the first frame has to be one of ours (OptimizedModule does the same).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call)


def batch_dependent(model: torch.nn.Module) -> list[str]:
    """Names of modules whose output differs with the split of a batch: batch statistics and dropout."""
    names = []
    for name, module in model.named_modules():
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        drops = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
        own_rate = getattr(module, "dropout", None)  # MultiheadAttention keeps it as a number
        if is_norm or drops or (isinstance(own_rate, float) and own_rate > 0):
            names.append(f"{name or 'model'} ({type(module).__name__})")
    return names
