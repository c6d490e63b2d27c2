"""Build the user's model, prepare it for training and find parts whose output depends on how a batch is split."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from distributed.backends._torch import seeding, several_models
from distributed.backends._torch.generators import forked
from distributed.backends.keras_kinds import is_model
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.engines import seed_python_and_numpy


def build_model(model_or_factory: Any, config: DistributedConfig, device: torch.device) -> torch.nn.Module:
    """Return the given module, or the one that a factory builds from the seed, in the `dtype` of the run.

    A factory may draw from the generator of `device`. A Keras model is returned in a KerasModule that is still empty.
    """
    model = make_model(model_or_factory, config, device)
    if is_model(model):
        from distributed.backends._torch.keras_module import KerasModule

        return KerasModule(model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model factory returned a {type(model).__name__}: return a torch.nn.Module")
    _refuse_unbuilt(model)
    return model.double() if config.dtype == "float64" else model


def _refuse_unbuilt(model: torch.nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    if (name := next((name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)), None)) is not None:
        raise ConfigError(
            f"{name} has no shape before the model has seen a batch: call the model on a batch once before you pass it"
            " (in the factory, if there is one), or give its layer the sizes"
        )


def check_can_be_cut(model: torch.nn.Module, engine: str, *, allows_sparse: bool = False) -> None:
    """Raise ConfigError if `engine` cannot shard a parameter over the processes."""
    sparse = frozenset() if allows_sparse else sparse_names(model)
    for name, parameter in model.named_parameters():
        if name in sparse:
            raise ConfigError(
                f"{name} gets sparse gradients, which {engine} cannot shard: build its module with sparse=False, or use"
                " backend='pytorch-ddp'"
            )
        if parameter.dim() == 0:
            raise ConfigError(
                f"{name} is a single number without a dimension, which {engine} cannot shard: make it one of shape [1],"
                " torch.nn.Parameter(torch.ones(1)), or use backend='pytorch-ddp'"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"{name} is not contiguous in memory, so {engine} cannot shard it: build it with .contiguous(), or use"
                " backend='pytorch-ddp'"
            )


def make_model(model_or_factory: Any, config: DistributedConfig, device: torch.device) -> Any:
    """Return the given torch or Keras model, or the one that a factory builds from the seed.

    A mapping of several models is returned as one module. Its factories are called in their order.
    """
    if isinstance(model_or_factory, torch.nn.Module) or is_model(model_or_factory):
        return model_or_factory
    before = random.getstate(), numpy.random.get_state()
    with forked(device):
        seeding.seed(config.seed, device)
        # Keras draws the seeds of its initializers from Python's generator.
        seed_python_and_numpy(config.seed, config.seed & 0xFFFFFFFF)
        try:
            if isinstance(model_or_factory, Mapping):
                return several_models.joined(model_or_factory, _made)
            return model_or_factory()
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


def _made(model_or_factory: Any) -> Any:
    return model_or_factory if isinstance(model_or_factory, torch.nn.Module) else model_or_factory()


def sparse_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters with sparse gradients: those of modules with `sparse=True`."""
    owned = {id(p) for module in model.modules() if getattr(module, "sparse", False) for p in module.parameters(False)}
    return frozenset(name for name, p in model.named_parameters() if id(p) in owned)


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a network: the outermost entries of a ModuleList or Sequential that have submodules."""
    blocks = [
        block
        for container in model.modules()
        if isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        for block in container
        if any(True for _ in block.children()) and any(True for _ in block.parameters())
    ]
    return [b for b in blocks if not any(b is not other and _contains(other, b) for other in blocks)]


def _contains(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def compile_calls(model: torch.nn.Module) -> None:
    """Compile the calls of any model.

    Workaround (torch 2.13, pytorch/pytorch#185722; may go when the oldest supported torch has that change): torch's own
    `model.compile()` compiles nothing of a bare Sequential or Linear, because Dynamo skips frames of files in torch.nn.
    The first frame therefore has to be in this package. OptimizedModule does the same.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call)


def batch_dependent(model: torch.nn.Module) -> list[str]:
    """Return the names of modules whose output depends on how a batch is split: batch statistics and dropout."""
    names = []
    for name, module in model.named_modules():
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        drops = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
        own_rate = getattr(module, "dropout", None)  # MultiheadAttention stores its dropout as a number
        if is_norm or drops or (isinstance(own_rate, float) and own_rate > 0):
            names.append(f"{name or 'model'} ({type(module).__name__})")
    return names
