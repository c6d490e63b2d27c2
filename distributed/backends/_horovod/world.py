"""Communicate between the processes of a run over Horovod's collectives, without a torch process group."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distributed.backends import wire
from distributed.backends._horovod.exchange import Reduction, finished, horovod_state
from distributed.backends._horovod.rendezvous import ADDRESS, Rendezvous
from distributed.backends._horovod.timeline import is_prepared
from distributed.backends._torch.rendezvous import rendezvous
from distributed.backends._torch.world import OneTorchProcess, Pending, TorchWorld
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.exposure import store_warnings
from distributed.launching.listening import listen_at
from distributed.launching.request import link
from distributed.launching.secret import messages
from distributed.runs.temporary import temporary_directory
from distributed.state import WorkerContext

_REDUCED = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)  # types that Horovod can add


class HorovodWorld(TorchWorld):
    """World of Horovod, which this class or the script initialised. `leave` does not stop Horovod, so that the next
    Trainer can use it."""

    def __init__(
        self,
        plan: ProcessPlan,
        config: DistributedConfig,
        warn: Callable[[str], None],
        found: WorkerEnvironment | None = None,
        call: str = "fit()",
    ) -> None:
        self._hvd = hvd = load()
        found = found or worker_environment()
        horovod_state.timeout_s = config.timeout_s
        self._is_ours = horovod_state.is_left or not hvd.is_initialized()
        _initialise(hvd, found, config, warn, call)
        horovod_state.is_left = False
        size, rank, local_rank, local_size = hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size()
        if found is not None and found.world_size != size:
            raise ConfigError(
                f"hvd.init() made a world of {size}, but the launcher started {found.world_size} processes: start with"
                " 'python -m distributed.cli train --backend horovod' or horovodrun, or drop hvd.init()"
            )
        if plan.device == "cuda":
            torch.cuda.set_device(local_rank)
        device = f"cuda:{local_rank}" if plan.device == "cuda" else "cpu"
        self.context = WorkerContext(rank, size, local_rank, local_size, hvd.cross_rank(), device)
        if size > 1:
            self.transport = "mpi" if hvd.mpi_enabled() else "gloo"
        self._num_pending = 0
        if horovod_state.store is None and size > 1:
            horovod_state.store = self._open_store(warn)

    def is_alive(self) -> bool:
        return bool(self._hvd.is_initialized()) and not horovod_state.is_left

    def combine(self, tensor: torch.Tensor, operation: str) -> Pending:
        wire = tensor if tensor.dtype in _REDUCED else tensor.to(_wire_type(tensor.dtype))
        op = getattr(self._hvd, operation.capitalize())
        handle = self._hvd.allreduce_async_(wire, op=op, name=f"combine.{self._num_pending}")
        self._num_pending += 1

        def finish() -> None:
            self._num_pending -= 1
            if wire is not tensor:
                tensor.copy_(wire)

        return Reduction(self._hvd, handle, finish)

    def copy_from(self, tensor: torch.Tensor, src: int) -> None:
        self.copy_all_from([tensor], src)

    def copy_all_from(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Copy rank `src`'s values into `tensors` in place. A collective; the order of the tensors is the same on
        all ranks."""
        hvd, handles = self._hvd, []
        for number, tensor in enumerate(each.detach() for each in tensors if each.numel()):
            wire = _bytes(tensor.contiguous())
            handles.append((tensor, wire, hvd.broadcast_async_(wire, src, name=f"copy.{number}")))
        for tensor, wire, handle in handles:
            finished(hvd, handle)
            tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = self._allgather(_bytes(tensor).reshape(1, -1), "gather")
        return [row.clone().view(tensor.dtype).view(tensor.shape) for row in rows]

    def reduce_scatter(self, rows: torch.Tensor, operation: str) -> torch.Tensor:
        whole = rows.clone()
        self.combine(whole, operation).wait()
        return whole[self.context.rank]

    def wrap(self, module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        from distributed.backends._horovod.wrapper import AveragedGradients

        self.copy_all_from([*module.parameters(), *module.buffers()], 0)
        return AveragedGradients(module, self, options.get("bucket_cap_mb"))

    def unwrap(self, wrapped: torch.nn.Module) -> None:
        from distributed.backends._horovod.wrapper import AveragedGradients

        if isinstance(wrapped, AveragedGradients):
            wrapped.release()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        is_mine = self.context.rank == src
        content = _bytes_of(value) if is_mine else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        self.copy_from(size, src)
        if not is_mine:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.copy_from(content, src)
        return value if is_mine else _value_of(content)

    def gather(self, value: Any) -> list[Any]:
        content = _bytes_of(value)
        sizes = self._allgather(torch.tensor([content.numel()]), "objects.sizes").tolist()
        parts = torch.split(self._allgather(content, "objects"), sizes)
        return [_value_of(part) for part in parts]

    def barrier(self) -> None:
        self.combine(torch.zeros(1), "sum").wait()

    def key_value_store(self) -> Any:
        return messages(horovod_state.store, "common-step") if horovod_state.store is not None else None

    def leave(self) -> None:
        if self._is_ours:
            self.end()

    def end(self) -> None:
        horovod_state.is_left = True

    def _allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        joined: torch.Tensor = finished(self._hvd, self._hvd.allgather_async(tensor, name=name))
        return joined

    def _open_store(self, warn: Callable[[str], None]) -> Any:
        """Open a store for a world that another launcher started. A collective: rank 0 sends the store's address to the
        others through Horovod."""
        if self._hvd.cross_size() == 1:
            return self._open_file_store()
        opened, address = None, None
        if self.context.is_main_process:
            host = os.uname().nodename
            listener = listen_at(host, 0)
            address = (host, listener.getsockname()[1])
            for text in store_warnings(*address):
                warn(text)
            opened = dist.TCPStore(
                *address, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.detach()
            )
        host, port = self.broadcast(address, 0)
        return opened or dist.TCPStore(host, port, None, False, timedelta(seconds=60))

    def _open_file_store(self) -> Any:
        """Open a store for one node, in a file that only this user can open. Rank 0 removes the file at exit. A
        collective."""
        directory = None
        if self.context.is_main_process:
            files = temporary_directory()
            directory = str(files.__enter__())
            atexit.register(files.__exit__, None, None, None)
        return dist.FileStore(f"{self.broadcast(directory, 0)}/store", -1)


def join(
    plan: ProcessPlan,
    config: DistributedConfig,
    warn: Callable[[str], None],
    found: WorkerEnvironment | None = None,
    call: str = "fit()",
) -> TorchWorld:
    """Join and return the world of a run with Horovod. A single process does not use Horovod, but checks that it can be
    loaded."""
    if plan.world_size == 1:
        load()
        return OneTorchProcess(plan)
    return HorovodWorld(plan, config, warn, found, call)


def load() -> Any:
    """Return horovod.torch. Raises ResourceError if it is missing or was built for another torch."""
    try:
        import horovod.torch as hvd
    except ModuleNotFoundError as error:
        raise ResourceError(
            f"the installed horovod is incomplete, {error.name} is missing: run 'make horovod', which builds it"
        ) from None
    except ImportError as error:
        raise ResourceError(
            f"horovod was built for another torch than {torch.__version__}, or without torch: run 'make horovod', which"
            f" rebuilds it ({str(error).splitlines()[0]})"
        ) from None
    return hvd


def is_left() -> bool:
    """Return True if this process has left the world of Horovod. Horovod itself keeps running in the process."""
    return horovod_state.is_left


def _initialise(
    hvd: Any, found: WorkerEnvironment | None, config: DistributedConfig, warn: Callable[[str], None], call: str
) -> None:
    """Start Horovod in this process, over the rendezvous of our launcher, horovodrun or mpirun, unless it runs
    already."""
    if hvd.is_initialized():
        return
    _refuse_second()
    if horovod_state.store is not None:
        raise ResourceError("hvd.shutdown() was called in this process, and Horovod starts once: drop that call")
    transport = config.communication_backend
    is_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ and hvd.mpi_built() and transport != "gloo"
    if transport == "mpi" and not is_mpi:
        raise ConfigError(
            "communication_backend='mpi' needs a Horovod with MPI ('make horovod' with MPI's headers installed) that mpirun"
            " started: mpirun -np N python -m distributed.cli train ... --backend horovod"
        )
    _set_defaults(config)
    is_horovodrun = ADDRESS in os.environ and link() is None
    if not is_mpi and not is_horovodrun and found is not None:
        horovod_state.store = _rendezvous(found, config, warn, call)
    hvd.init()


def _refuse_second() -> None:
    """Raise ConfigError if horovod.tensorflow runs in this process.

    Workaround (Horovod 0.28.1, no upstream issue known; may go when two of its modules can run in one process):
    horovod.tensorflow would receive messages that are sent by horovod.torch.
    """
    other = sys.modules.get("horovod.tensorflow")
    if other is not None and getattr(other, "is_initialized", bool)():
        raise ConfigError(
            "hvd.init() of horovod.tensorflow was called in this process, and Horovod starts once: drop it, or call that of"
            " horovod.torch, which the trainer uses for Keras models too"
        )


def _rendezvous(found: WorkerEnvironment, config: DistributedConfig, warn: Callable[[str], None], call: str) -> Any:
    """Wait for all ranks, or raise an error that names the missing ones. If no launcher runs the server of Horovod's
    rendezvous, rank 0 does."""
    store = rendezvous(found, config.start_timeout, warn, call)
    if ADDRESS not in os.environ:
        shared = messages(store, "horovod")
        if found.rank == 0:
            horovod_state.server = Rendezvous()  # listens until this process ends
            is_alone = found.local_world_size == found.world_size
            shared.set("port", str(horovod_state.server.open(found.master_addr, is_alone=is_alone)))
        os.environ.update(Rendezvous.environ(found, int(shared.get("port"))))
    return store


def _set_defaults(config: DistributedConfig) -> None:
    """Set the variables that Horovod reads at its start, unless the user set them."""
    seconds = str(max(1, math.ceil(config.timeout_s)))
    defaults = {
        "HOROVOD_LOG_LEVEL": "fatal",  # errors become exceptions
        "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": seconds,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": seconds,
        # Fusion is off: it depends on timing, and a sum of three or more terms depends on their order.
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
    # Workaround (Horovod 0.28.1, no upstream issue known; may go when the timeline's writer waits without spinning): the
    # writer keeps one core busy, so it is started only for runs that may write a timeline.
    if is_prepared(config):
        defaults["HOROVOD_TIMELINE"] = "DYNAMIC"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _wire_type(dtype: torch.dtype) -> torch.dtype:
    """Return a type that Horovod can add, in which values of `dtype` are sent. Raises ConfigError for complex types."""
    if dtype.is_complex:
        raise ConfigError(f"Horovod does not combine {dtype}: use torch.view_as_real(tensor)")
    return torch.float32 if dtype.is_floating_point else torch.int32


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a tensor [n], because Horovod can send every type as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _bytes_of(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(wire.to_bytes(value)), dtype=torch.uint8)


def _value_of(content: torch.Tensor) -> Any:
    return wire.from_bytes(content.numpy().tobytes())
