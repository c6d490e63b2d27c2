"""The registry of backends: one row each. A new backend is one file plus one row here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError, nearest

if TYPE_CHECKING:
    from distributed.backends.base import Backend


@dataclass(frozen=True)
class BackendRow:
    """What the rest of the package may know of a backend without importing it."""

    name: str  # the value of `backend`
    module: str  # where its class lives
    class_name: str
    group: str  # the name of its option group in code and YAML
    preload: tuple[str, ...]  # modules the fork server imports once for all workers
    requires: tuple[str, ...]  # importable names without which it cannot run
    install: str  # the exact command that makes it usable
    summary: str  # what it does, for help and documentation
    single_process: bool = False  # refuses more than one process
    is_default: bool = (
        False  # chosen where nobody says which: for one process if it is single_process, else for several
    )
    aliases: Mapping[str, str] = field(default_factory=dict)  # other spellings of its options, flat: spelling -> option


# AdamW and DDP import torch._dynamo on first use, which costs a worker a second: the fork server does it once.
_TORCH_PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
_TORCH_INSTALL = "pip install 'distributed-trainer[torch]'"

REGISTRY: dict[str, BackendRow] = {
    row.name: row
    for row in (
        BackendRow(
            "single", "distributed.backends.single", "SingleBackend", "single", _TORCH_PRELOAD, ("torch",), _TORCH_INSTALL,
            "one process, no communication", single_process=True, is_default=True,
        ),
        BackendRow(
            "pytorch-ddp", "distributed.backends.ddp", "DDPBackend", "ddp", _TORCH_PRELOAD, ("torch",), _TORCH_INSTALL,
            "PyTorch DistributedDataParallel: a full copy of the model in every process", is_default=True,
            aliases={
                "find_unused_parameters": "find_unused_parameters", "bucket_cap_mb": "bucket_cap_mb",
                "bucket_size_mb": "bucket_cap_mb", "static_graph": "static_graph",
            },
        ),
        BackendRow(
            "fsdp", "distributed.backends.fsdp", "FSDPBackend", "fsdp",
            (*_TORCH_PRELOAD, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"), ("torch",), _TORCH_INSTALL,
            "PyTorch FSDP2: parameters, gradients and optimizer state cut over the processes",
        ),
    )
}  # fmt: skip

# Backends of a later version, so that their names are not taken for misspelt ones.
LATER = ("deepspeed", "horovod", "ray", "tensorflow", "tensor-parallel", "pipeline")
_TRANSPORTS = ("nccl", "gloo", "mpi", "ucc")


def backend_row(name: str) -> BackendRow:
    """The registry row of `name`; ConfigError with the nearest name where there is none."""
    if name in REGISTRY:
        return REGISTRY[name]
    if name in _TRANSPORTS:
        raise ConfigError(
            f"backend={name!r} is a transport, not a backend: set communication_backend={name!r} (--communication-backend {name})"
        )
    if name in LATER:
        raise ConfigError(f"backend={name!r} is not in this version: choose one of {', '.join(REGISTRY)}")
    raise ConfigError(f"backend={name!r} is not known{nearest(name, REGISTRY)}: choose one of {', '.join(REGISTRY)}")


def backend_class(name: str) -> type[Backend[Any]]:
    """The adapter class of backend `name`. Imports its file, never its engine."""
    row = backend_row(name)
    cls: type[Backend[Any]] = getattr(importlib.import_module(row.module), row.class_name)
    return cls


def default_backend(world_size: int) -> str:
    """The backend of a run of `world_size` processes for which nobody chose one."""
    return next(row.name for row in REGISTRY.values() if row.is_default and row.single_process == (world_size == 1))


def option_class(group: str) -> type[Any]:
    """The `Options` class of the backend whose group of options is `group`. Imports its file, never its engine."""
    (name,) = (row.name for row in REGISTRY.values() if row.group == group)
    return backend_class(name).Options
