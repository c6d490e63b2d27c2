"""Seed torch's generators in a process that may not have loaded torch. Generators of a rank are in `generators`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed(value: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch, if torch is loaded.

    Args:
        value: the seed, of 64 bits.
        device: seed only the generators of the CPU and of this device. If None, seed those of all devices.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    if device is None:
        torch.manual_seed(value)
        return
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
