"""Seed torch's generators in a process that may not have loaded torch. Generators of a rank are in `generators`."""

from __future__ import annotations

import sys


def seed(value: int) -> None:
    """Seed the global generators of torch for all devices, if torch is loaded."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(value)
