"""Run torch's Adam and AdamW with DeepSpeed's C++ update, for parameters in host memory. The optimizer's state has
torch's form. The updates differ from torch's by rounding only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from distributed.backends._deepspeed import operators
from distributed.errors import ConfigError

_numbers = itertools.count(1 << 20)  # ids in the C++ operator; DeepSpeed numbers its own optimizers from 0


def load(limit_s: float, notice: Callable[[str], None]) -> Any:
    """Return the compiled operator. Compile it if necessary."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    flags = [*builder.cxx_args(), "-g0"]  # without debug information, which takes a third of the compiler's time
    builder.cxx_args = lambda: flags
    return operators.load("cpu_adam", lambda: builder.load(verbose=False), limit_s, notice)


class HostAdam:
    """Make the updates of a torch.optim.Adam or AdamW. The optimizer keeps its class and the form of its state."""

    def __init__(self, operator: Any, optimizer: torch.optim.Optimizer) -> None:
        check(optimizer)
        self._operator, self._optimizer, self._number = operator, optimizer, next(_numbers)
        group = optimizer.param_groups[0]
        is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        operator.create_adam(
            self._number, float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], is_decoupled, False
        )
        self._before = vars(optimizer).get("step")  # the method that a schedule has patched, or None
        vars(optimizer)["step"] = self._step

    @torch.no_grad()
    def _step(self, closure: Any = None) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, self._optimizer.state[parameter])

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        self._operator.adam_update(
            self._number, int(state["step"]), float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"],
            True, parameter.data, parameter.grad, state["exp_avg"], state["exp_avg_sq"],
        )  # fmt: skip

    def release(self) -> None:
        """Let the optimizer make its own updates again."""
        del vars(self._optimizer)["step"]
        if self._before is not None:
            vars(self._optimizer)["step"] = self._before
        self._operator.destroy_adam(self._number)


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the operator cannot make the updates of `optimizer`."""
    is_plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not is_plain or any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
        raise ConfigError(
            f"deepspeed.cpu_adam=True supports Adam and AdamW without amsgrad and maximize only, not this {type(optimizer).__name__}:"
            f" drop it"
        )
