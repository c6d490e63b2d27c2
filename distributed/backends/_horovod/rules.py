"""Horovod's options, the settings that it refuses, and what its settings need, with Keras on either engine. Loads no
engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from distributed.backends._tensorflow import refusals
from distributed.backends.base import Backend, If, Refusals
from distributed.backends.effects import SEVERAL_PROCESSES, Need, Situation
from distributed.config.fields import setting
from distributed.errors import ConfigError
from distributed.state import Job


def _compression_word(value: Any) -> Any:
    """Return our name for a class such as `hvd.Compression.fp16`, and any other value unchanged."""
    name = getattr(value, "__name__", "")
    return {"FP16Compressor": "fp16", "NoneCompressor": "none"}.get(name, value)


@dataclasses.dataclass(frozen=True)
class HorovodOptions:
    """Settings of Horovod's gradient exchange."""

    compression: str = setting(
        "none", "element type of gradients on the wire; code may also pass hvd.Compression.fp16", choices=("none", "fp16"),
        convert=_compression_word,
    )  # fmt: skip
    adasum: bool = setting(False, "combine gradients by Adasum instead of averaging them (needs mpirun)")
    timeline: str | None = setting(None, "a file in the run directory for Horovod's trace of its collectives", str)
    keras_backend: str = setting(
        "torch",
        "framework that runs Keras models; with 'tensorflow' only Keras models can be trained",
        choices=("torch", "tensorflow"),
    )


def _on_tensorflow(refused: Refusals) -> dict[str, tuple[If, ...]]:
    """Return the refusals of the TensorFlow step as refusals under the condition that Keras runs on TensorFlow."""

    def holds(own: Any) -> bool:
        return bool(own.options.keras_backend == "tensorflow")

    return {
        name: (If("with horovod.keras_backend='tensorflow'", holds, reason),)
        for name, reason in refused.items()
        if isinstance(reason, str)
    }


def _has_another_rendezvous(where: Situation, name: str) -> str:
    is_theirs = where.request is None and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
    is_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ and where.backend.config.communication_backend != "gloo"
    return "horovodrun and mpirun use their own limits" if is_theirs or is_mpi else ""


_OUR_RENDEZVOUS = Need("processes that horovodrun and mpirun did not start", _has_another_rendezvous)


def check_job(job: Job) -> None:
    """Raise ConfigError for a model or an optimizer that cannot be used with Horovod on any engine."""
    if type(job.model).__module__.partition(".")[0] == "mxnet":
        raise ConfigError("the model is one of MXNet, which is retired and not supported: use a torch or Keras model")
    if hasattr(job.optimizer, "_allreduce_grad_async"):
        raise ConfigError(
            "the optimizer is one that hvd.DistributedOptimizer made: pass the plain one, backend 'horovod' exchanges the"
            " gradients itself"
        )


# Refusals of the TensorFlow step that do not apply: Horovod does the communication, and REFUSES has checkpoint_async and
# snapshot_every_n_steps for both engines.
_NOT_WITH_HOROVOD = ("communication_backend", "address", "checkpoint_async", "snapshot_every_n_steps")
NEEDS: Mapping[str, tuple[Need, ...]] = {
    **dict.fromkeys(("horovod.compression", "horovod.adasum", "horovod.timeline"), (SEVERAL_PROCESSES,)),
    "start_timeout": (SEVERAL_PROCESSES, _OUR_RENDEZVOUS),
}
REFUSES: Refusals = {
    "checkpoint_async": "its checkpoints are written synchronously: drop it, or use backend 'pytorch-ddp'",
    "snapshot_every_n_steps": "it keeps no snapshots in memory: drop it, or use backend 'pytorch-ddp'",
    "communication_backend=nccl": "Horovod uses NCCL for GPUs if it was built with NCCL: drop it",
    "communication_backend=mpi": (
        If(
            "in processes that mpirun did not start",
            lambda own: "OMPI_COMM_WORLD_SIZE" not in os.environ,
            "write mpirun -np N python -m distributed.cli train ... --backend horovod",
        ),
    ),
    "master_addr": (
        If(
            "on several nodes as an IPv6 address",
            lambda own: own.plan.num_nodes > 1 and ":" in own.config.master_addr,
            "Horovod's workers find each other over IPv4: name node 0, or give its IPv4 address",
        ),
    ),
    "dtype=float64": (
        If(
            "with horovod.compression='fp16'",
            lambda own: own.options.compression != "none",
            "that is lossy: drop one of them",
        ),
    ),
    **_on_tensorflow({name: refused for name, refused in refusals.REFUSES.items() if name not in _NOT_WITH_HOROVOD}),
}
REFUSES_CALLBACKS: Refusals = _on_tensorflow(Backend.refuses_callbacks)
