"""DistributedDataParallel and DistributedSampler for scripts without `Trainer`, in one process and in many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from distributed import comm
from distributed.comm import membership
from distributed.errors import ConfigError, DistributedError


class DistributedDataParallel(torch.nn.Module):
    """Wrap `module` on every rank and average its gradients over all ranks in each backward pass.

    Every rank must construct it. The parameters of rank 0 are copied to all ranks. In a world of one rank it changes
    nothing.

    Args:
        module: the model, on its device. The attribute `module` holds it; `state_dict()` has the names of torch's
            wrapper.
        bucket_cap_mb: megabytes of gradients per all-reduce. None means torch's default of 25.
        bucket_size_mb: another name of `bucket_cap_mb`.
        find_unused_parameters: search the graph of each step for parameters that get no gradient.
        static_graph: promise that the graph is the same in every step.
        device_ids: the model's device, accepted for compatibility with torch. Not needed.

    Raises:
        ConfigError: an argument is wrong, or there are other ranks and `init_process_group` was not called.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        bucket_size_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        device_ids: list[Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
        _check_device(module, device_ids)
        options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        capacity = _capacity(bucket_cap_mb, bucket_size_mb)
        if capacity is not None:
            options["bucket_cap_mb"] = capacity
        world = membership.current_world()
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        self.module = module
        # Set without registering a sub-module: `state_dict()` keeps its names, and `release` can drop torch's wrapper.
        self.__dict__["_wrapped"] = world.wrap(module, **options) if is_trained else module
        self.__dict__["_world"] = world
        self._is_static, self._has_synced = static_graph, False
        self._is_held = self._is_local = self._is_released = False
        membership.wrappers().add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the module."""
        if torch.is_grad_enabled() and self.training:
            if self._is_released:
                raise DistributedError(
                    "the process group of this model has ended: train before destroy_process_group(), or wrap"
                    " model.module again"
                )
            self._is_local = self._is_held
            self._has_synced = self._has_synced or not self._is_held
        return self.__dict__["_wrapped"](*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager inside which gradients are not averaged over the ranks.

        The next backward pass outside averages the accumulated sums.
        """
        wrapped = self.__dict__["_wrapped"]
        if wrapped is self.module or (self._is_static and not self._has_synced):
            # Workaround (torch 2.13, pytorch/pytorch#143580; may go when the oldest supported torch has
            # pytorch/pytorch#187732): torch fails if the first backward pass of a static graph is not synchronised.
            # Synchronising gives the same sums.
            yield
            return
        before, self._is_held = self._is_held, True
        try:
            with wrapped.no_sync():
                yield
        finally:
            self._is_held = before

    def sync_gradients(self) -> None:
        """Average the gradients that `no_sync` kept local. Every rank must call it.

        Does nothing if they are averaged already.
        """
        if not self._is_local:
            return
        self._is_local = False
        alike: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in alike.values():
            _average(parameters)

    def release(self) -> None:
        """Drop torch's wrapper, so that the process group can end. The model then belongs to this process alone."""
        self.__dict__["_world"].unwrap(self.__dict__["_wrapped"])
        self.__dict__["_wrapped"] = self.module
        self._is_released = True


def _average(parameters: list[torch.nn.Parameter]) -> None:
    """Average the gradients in one collective. A missing gradient counts as zero, and stays None if all ranks lack
    it."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    has = torch.tensor([float(p.grad is not None) for p in parameters]).to(grads[0])
    flat = comm.all_reduce(torch.cat([has, *(grad.reshape(-1) for grad in grads)]), comm.ReduceOp.AVERAGE)
    found, *means = torch.split(flat, [len(parameters), *(grad.numel() for grad in grads)])
    for parameter, grad, mean, is_there in zip(parameters, grads, means, found.tolist(), strict=True):
        if is_there:
            grad.copy_(mean.view_as(grad))
            parameter.grad = grad


def _capacity(cap: float | None, size: float | None) -> float | None:
    if cap is not None and size is not None and cap != size:
        raise ConfigError(f"bucket_cap_mb={cap} and bucket_size_mb={size} set the same thing: drop one of them")
    value = cap if cap is not None else size
    if value is not None and value <= 0:
        raise ConfigError(f"bucket_cap_mb={value} is not above 0: give megabytes, torch's default is 25")
    return value


def _check_device(module: torch.nn.Module, device_ids: list[Any] | None) -> None:
    parameter = next(module.parameters(), None)
    if device_ids is None or parameter is None:
        return
    devices = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in device_ids]
    if devices != [parameter.device]:
        raise ConfigError(
            f"device_ids={device_ids}, but the model is on {parameter.device}: move it there, or drop device_ids"
        )


class DistributedSampler(TorchSampler[Any]):
    """Sample the part of a data set that belongs to this rank.

    All ranks get the same number of indices. The first ones are repeated if the length is not divisible by the number of ranks.

    Args:
        dataset: an object with a length. Pass either this or `dataset_size`.
        num_replicas: the number of parts. None means the number of ranks.
        rank: the number of this part, from 0. None means the rank of this process.
        shuffle: whether to shuffle in each epoch (`set_epoch`), in the same way on all ranks.
        seed: the seed of the shuffling.
        drop_last: leave out the last samples instead of repeating the first ones.
        dataset_size: the number of samples.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        dataset: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset_size: int | None = None,
    ) -> None:
        if (dataset is None) == (dataset_size is None):
            raise ConfigError("DistributedSampler needs either a dataset or dataset_size: give one of them")
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise ConfigError(f"dataset is a {type(dataset).__name__} without a length: slice it in its own __iter__")
        if dataset_size is not None and dataset_size < 0:
            raise ConfigError(f"dataset_size={dataset_size} is below 0: give the number of samples")
        size = membership.get_world_size() if num_replicas is None else num_replicas
        mine = membership.get_rank() if rank is None else rank
        if not 0 <= mine < size:
            raise ConfigError(f"rank={mine} is not below num_replicas={size}: number parts from 0")
        sized: Any = dataset if dataset is not None else range(dataset_size or 0)
        super().__init__(sized, size, mine, shuffle, seed, drop_last)
