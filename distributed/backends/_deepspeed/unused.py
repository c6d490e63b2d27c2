"""Detect parameters on which no rank's loss depends. DeepSpeed gives them a gradient of zero; torch gives them none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from distributed.errors import ConfigError

# Options of a parameter group with which an update changes a parameter although its gradient is zero.
_DECAYS = ("weight_decay", "lambd")


class FirstGradients:
    """Record which parameters get a gradient between the construction of this object and `check`."""

    def __init__(self, names: Mapping[torch.nn.Parameter, str], groups: list[dict[str, Any]]) -> None:
        """Watch the parameters in `groups` that an update changes even if their gradient is zero."""
        decayed = [p for group in groups for p in group["params"] if any(group.get(name) for name in _DECAYS)]
        watched = [p for p in decayed if p.requires_grad and p in names]
        self._seen = {names[p]: 0.0 for p in watched}
        self._hooks = [p.register_hook(self._record(names[p])) for p in watched]

    def _record(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            self._seen[name] = 1.0

        return record

    def check(self, reduce: Callable[[dict[str, float]], dict[str, float]]) -> None:
        """Raise ConfigError if a parameter got no gradient on any rank. A collective: every rank must call it."""
        self.release()
        unused = [name for name, count in reduce(self._seen).items() if not count]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ConfigError(
                f"{unused[0]}{more} got no gradient in the first update, which DeepSpeed treats as a gradient of zero: weight"
                " decay would shrink it, while torch leaves it unchanged. Freeze it with requires_grad_(False), put it in a"
                " parameter group with weight_decay=0, or use backend='pytorch-ddp' with ddp.find_unused_parameters=True"
            )

    def release(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
