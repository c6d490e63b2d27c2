"""What is true of GPUs and can be shown without one."""

from __future__ import annotations

import pytest
import torch
from tests.unit.fake_gpu import HostWaits, fake_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.backends._torch.nested import move


def test_the_fake_gpu_refuses_what_waits():
    with fake_gpu() as gpu:
        value = torch.ones(2, device=gpu)
        value.to("cpu", non_blocking=True)
        for wait in (lambda: value.sum().item(), lambda: value.to("cpu"), lambda: torch.tensor(1.0, device=gpu)):
            with pytest.raises(HostWaits):
                wait()


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.asynchronous = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.asynchronous.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_outputs_are_whole_when_they_leave_the_device():
    with fake_gpu(may_wait=True) as gpu, Copies() as copies:
        outputs = {"scores": torch.ones(2, 3, device=gpu)}
        assert move(outputs, torch.device("cpu"), None)["scores"].device.type == "cpu"
        assert move(outputs, torch.device("cpu"), torch.float64)["scores"].dtype == torch.float64
        assert copies.asynchronous == [False, False]  # else torch gives page-locked memory that is still being filled
        copies.asynchronous.clear()
        move([torch.ones(2)], gpu, None)
        assert copies.asynchronous == [True]
