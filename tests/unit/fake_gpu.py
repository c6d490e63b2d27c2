"""A GPU that is not there: tensors of `cuda:0` without contents, which no host can read.

torch's fake tensors know shape, type and device and check that an operation's inputs are on one device, without a driver.
Autograd and random numbers need a real device, so only what comes before and after a backward pass can be tried on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda:0")
_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class HostWaits(AssertionError):
    """The host would have to wait for the device."""


class NoWaiting(TorchDispatchMode):
    """Refuses what `torch.cuda.set_sync_debug_mode("error")` refuses on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in args if isinstance(value, torch.Tensor)]
        if func in _WAITS and any(value.is_cuda for value in given):
            raise HostWaits(f"{func} reads from the device")
        is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if is_copy and not _is_asynchronous(func, args, kwargs):
            devices = {value.device.type for value in given} | {
                torch.device(kwargs.get("device") or given[0].device).type
            }
            if len(devices) > 1:
                raise HostWaits(f"{func} copies between the host and the device, and waits for it")
        return func(*args, **kwargs)


def _is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.copy_.default:
        return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    return bool(kwargs.get("non_blocking", False))


@contextmanager
def fake_gpu(*, may_wait: bool = False) -> Iterator[torch.device]:
    """Tensors made inside, on `cuda:0` or the CPU, are without contents. HostWaits for what makes the host wait."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if may_wait:
            yield GPU
            return
        with NoWaiting():
            yield GPU
