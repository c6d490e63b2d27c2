"""Run collectives of torch tensors, in one process or in many."""

from __future__ import annotations

import abc
import atexit
import gc
import importlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distributed.backends import wire, world
from distributed.backends._torch.modules import sparse_names
from distributed.backends._torch.rendezvous import rendezvous
from distributed.backends.world import Key
from distributed.config.plan import ProcessPlan
from distributed.config.registry import TRANSPORTS
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.secret import messages
from distributed.state import WorkerContext


class Pending(Protocol):
    """Represent a collective in progress."""

    def wait(self) -> Any:
        """Wait until the result may be used."""


class TorchWorld(world.World):
    """Connect the processes that train together, with collectives for torch tensors.

    Every rank must call each collective, in the same order.
    """

    transport: str | None = None  # nccl, gloo or mpi; None for one process

    def is_alive(self) -> bool:
        """Return whether the process group still exists. Not a collective."""
        return True

    @abc.abstractmethod
    def combine(self, tensor: torch.Tensor, operation: str) -> Pending:
        """Start to combine the contiguous `tensor` in place over all ranks.

        The shape is the same on all ranks. `operation` is "sum", "product", "min" or "max".
        """

    @abc.abstractmethod
    def copy_from(self, tensor: torch.Tensor, src: int) -> None:
        """Overwrite the contiguous `tensor` with the values of rank `src`, in place."""

    @abc.abstractmethod
    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous `tensor` of every rank, in the order of ranks.

        The shape is the same on all ranks. This rank's entry is a copy too.
        """

    @abc.abstractmethod
    def reduce_scatter(self, rows: torch.Tensor, operation: str) -> torch.Tensor:
        """Return this rank's row of the contiguous `rows` [world_size, ...], combined over all ranks."""

    @abc.abstractmethod
    def wrap(self, module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Return `module`, wrapped to average its gradients over all ranks in each backward pass.

        `options` are those of torch's DDP.
        """

    def unwrap(self, wrapped: torch.nn.Module) -> None:
        """Undo `wrap`: the module inside belongs to this process only. Not a collective."""

    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        if self.world_size == 1 or not sums:
            return dict(sums)
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.context.device)
        self.combine(values, "sum").wait()
        return dict(zip(sums, values.tolist(), strict=True))

    @abc.abstractmethod
    def leave(self) -> None:
        """Leave the process group, unless the user joined it. Does not wait for other ranks."""

    def end(self) -> None:
        """Leave the process group, even if the user joined it. Does not wait for other ranks."""
        self.leave()


class _Done:
    """Represent a collective that has completed."""

    def wait(self) -> None:
        return None


class OneTorchProcess(world.OneProcess, TorchWorld):
    """Represent a world of one process."""

    def __init__(self, plan: ProcessPlan) -> None:
        self.context = WorkerContext(0, 1, 0, 1, 0, take_device(plan, 0))

    def combine(self, tensor: torch.Tensor, operation: str) -> Pending:
        return _Done()

    def copy_from(self, tensor: torch.Tensor, src: int) -> None:
        return None

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone()]

    def reduce_scatter(self, rows: torch.Tensor, operation: str) -> torch.Tensor:
        return rows[0].clone()

    def wrap(self, module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        return module

    def leave(self) -> None:
        return None


class ProcessGroup(TorchWorld):
    """The default process group of torch.distributed: the user's if the script created it, else one that we join."""

    def __init__(
        self,
        plan: ProcessPlan,
        config: DistributedConfig,
        warn: Callable[[str], None],
        transport: str | None = None,
        found: WorkerEnvironment | None = None,
        call: str = "fit()",
    ) -> None:
        """Join the process group. Wait up to `start_timeout` for the other ranks. Later collectives wait up to `timeout_s`.

        `found` describes this process if its environment does not. `call` names the call that missing ranks did not
        make.
        """
        found = found or worker_environment()
        if found is None and plan.world_size == 1:
            found = WorkerEnvironment(0, 0, 1, 1, 0, "127.0.0.1", 0, 0, "alone")
        if found is None:
            raise ResourceError(
                f"backend {plan.backend!r} needs a launched worker: use 'python -m distributed.cli train', or fit()"
            )
        self._device = take_device(plan, found.local_rank)
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            if config.communication_backend == "mpi":
                raise ConfigError(
                    "backend='mpi' is not in PyTorch's wheels: use gloo, or --backend horovod under mpirun"
                )
            _join(found, _backends(plan, config, transport), config, warn, call)
            atexit.register(leave_group)
        self.context = WorkerContext(
            found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank, self._device
        )
        self.transport = dist.get_backend()
        is_other = config.communication_backend not in (None, self.transport)
        # torch has other names for a process group with several transports.
        if is_other and self.transport in TRANSPORTS:
            raise ConfigError(
                f"communication_backend={config.communication_backend!r} is not the {self.transport!r} that the script joined"
                " with: drop one of them"
            )

    def is_alive(self) -> bool:
        return dist.is_initialized()

    def combine(self, tensor: torch.Tensor, operation: str) -> Pending:
        work: Pending = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation.upper()), async_op=True)
        return work

    def copy_from(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, src=src)

    def gather_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        boxes = [torch.empty_like(tensor) for _ in range(self.context.world_size)]
        dist.all_gather(boxes, tensor)
        return boxes

    def reduce_scatter(self, rows: torch.Tensor, operation: str) -> torch.Tensor:
        mine = torch.empty_like(rows[0])
        # Flatten the tensors, because gloo requires equal numbers of dimensions. torch before 2.13 has
        # the function under its old name.
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce(mine.view(-1), rows.view(-1), op=getattr(dist.ReduceOp, operation.upper()))
        return mine

    def wrap(self, module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        if len(trained) > 1 and (sparse := sparse_names(module)):
            raise ConfigError(
                f"{min(sparse)} has sparse gradients, which torch's DistributedDataParallel mixes up with others: build it with"
                " sparse=False, or train with Trainer"
            )
        devices = {parameter.device for parameter in module.parameters()}
        is_on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
        return DistributedDataParallel(module, device_ids=list(devices) if is_on_one_gpu else None, **options)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        is_mine = self.context.rank == src
        content = self._bytes(value) if is_mine else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([content.numel()], device=self._device)
        dist.broadcast(size, src=src)
        content = content if is_mine else torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(content, src=src)
        return value if is_mine else wire.from_bytes(content.cpu().numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        content = self._bytes(value)
        sizes = [int(size) for size in self.gather_tensors(torch.tensor([content.numel()], device=self._device))]
        padded = content.new_zeros(max(sizes))
        padded[: content.numel()] = content
        parts = [part[:size].cpu().numpy() for part, size in zip(self.gather_tensors(padded), sizes, strict=True)]
        return [wire.from_bytes(part.tobytes()) for part in parts]

    def _bytes(self, value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(wire.to_bytes(value)), dtype=torch.uint8).to(self._device)

    def barrier(self) -> None:
        device = torch.device(self._device)
        # Workaround (torch 2.13, no upstream issue known; may go when a barrier on the device of the group does not warn): without
        # the argument torch warns that it uses the current device, which is the same one.
        is_named = device.type == "cuda" and self.transport != "gloo"
        dist.barrier(device_ids=[device.index] if is_named else None)

    def key_value_store(self) -> Any:
        return messages(dist.distributed_c10d._get_default_store(), "common-step")

    def leave(self) -> None:
        if self._is_ours:
            leave_group()

    def end(self) -> None:
        leave_group()


def take_device(plan: ProcessPlan, local_rank: int) -> str:
    """Return the device of a rank and make it the current one.

    Ranks share GPUs if the plan has more ranks than the machine has GPUs. Raises ResourceError if torch cannot use
    the GPUs.
    """
    if plan.device != "cuda":
        return "cpu"
    if not torch.cuda.is_available():
        raise ResourceError(
            f"this machine shows a GPU that torch {torch.__version__} cannot use ({_why_no_cuda()}): install a torch for it,"
            " or add --device cpu"
        )
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it finds none"


def _backends(plan: ProcessPlan, config: DistributedConfig, usual: str | None) -> str:
    """Return torch's name of the transport. `usual` is the backend's default, such as "cpu:gloo,cuda:nccl"."""
    given = config.communication_backend
    if given is None:
        return usual or ("nccl" if plan.device == "cuda" else "gloo")
    return usual if usual is not None and usual.endswith(f":{given}") else given


def _join(
    found: WorkerEnvironment, transport: str, config: DistributedConfig, warn: Callable[[str], None], call: str
) -> None:
    # Workaround (torch 2.13, no upstream issue known; may go when the import of this module keeps no group alive): its
    # functions take the default group as the default of an argument. DDP imports the module. If the first import is
    # after joining, the group and its threads outlive destroy_process_group() and can abort the process at exit.
    importlib.import_module("torch.distributed.nn.functional")
    timeout = timedelta(seconds=config.timeout_s)
    store = dist.HashStore() if found.source == "alone" else rendezvous(found, config.start_timeout, warn, call)
    dist.init_process_group(transport, store=store, rank=found.rank, world_size=found.world_size, timeout=timeout)


def leave_group() -> None:
    """Destroy the default process group, without waiting for other ranks."""
    gc.collect()  # collect reference cycles that keep DDP wrappers alive
    if dist.is_initialized():
        dist.destroy_process_group()
