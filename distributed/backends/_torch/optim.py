"""Build the optimizer and learning-rate schedule of torch models."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distributed.backends._torch import named_optimizers
from distributed.backends._torch.sharding import is_sharded
from distributed.config.merging import MergedConfig
from distributed.config.optimization import NamedOptimizer, RateCurve
from distributed.config.plan import BatchPlan
from distributed.errors import ConfigError


def build_optimizer(
    optimizer_or_factory: Any, model: torch.nn.Module, merged: MergedConfig, notice: Callable[[str], None]
) -> torch.optim.Optimizer:
    """Return the user's optimizer, the one that settings name, or AdamW at `learning_rate`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            "the model has no parameter that requires a gradient, so there is nothing to train: pass another model"
        )
    if optimizer_or_factory is None:
        return torch.optim.AdamW(parameters, lr=merged.config.learning_rate)
    if isinstance(optimizer_or_factory, NamedOptimizer):
        return named_optimizers.build(optimizer_or_factory, model, notice)
    optimizer = (
        optimizer_or_factory
        if isinstance(optimizer_or_factory, torch.optim.Optimizer)
        else optimizer_or_factory(parameters)
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer factory returned a {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS calls the model several times per update, which no backend supports: use AdamW or SGD")
    _check_parameters(optimizer, model)
    return optimizer


def _check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer holds none of the model's parameters: build it from this model's .parameters(),"
            " or pass a factory: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )


def replace_rate(
    optimizer: torch.optim.Optimizer, scheduler: Any, merged: MergedConfig, notice: Callable[[str], None]
) -> None:
    """Replace the rate of a given optimizer by a `learning_rate` that the user set.

    The initial rate of a schedule given as an object is replaced too.
    """
    rate = merged.config.learning_rate
    if not merged.is_given("learning_rate"):
        return
    rates = {full_rate(group) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ConfigError(
            f"learning_rate={rate:g} cannot replace the different rates {', '.join(f'{r:g}' for r in sorted(rates))}"
            " of the optimizer's parameter groups: drop it, or set the rates in the optimizer"
        )
    if rates != {rate}:
        before = rates.pop()
        notice(f"learning_rate={rate:g} replaces the optimizer's {before:g}")
        schedule = scheduler if isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)) else None
        change_rates(optimizer, schedule, lambda old: rate if old == before else old * (rate / before))


def full_rate(group: Mapping[str, Any]) -> float:
    """Return the rate of a parameter group before a schedule (OneCycleLR, a warm-up) lowered it for the first update."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def set_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> None:
    """Set the rate of each parameter group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def change_rates(optimizer: torch.optim.Optimizer, scheduler: Any, change: Callable[[float], float]) -> None:
    """Apply `change` to the rates of all parameter groups and to every rate that a schedule stores in them or in itself."""
    set_rates(optimizer, [change(float(group["lr"])) for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        for name in ("initial_lr", "max_lr", "min_lr"):  # OneCycleLR sets the last two
            if name in group:
                group[name] = change(group[name])
    for schedule in _all_schedules(scheduler):
        for name in ("base_lrs", "_last_lr", "max_lrs"):
            if isinstance(getattr(schedule, name, None), list):
                setattr(schedule, name, [change(rate) for rate in getattr(schedule, name)])


def scale_rates(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    merged: MergedConfig,
    batch: BatchPlan,
    notice: Callable[[str], None],
) -> None:
    """Apply `lr_scaling` to the rates.

    "linear" multiplies them by k = global_batch_size / batch_size (Goyal et al., arXiv 1706.02677), "sqrt" by the
    square root of k.
    """
    mode = merged.config.lr_scaling
    factor = {"none": 1.0, "linear": batch.lr_ratio, "sqrt": math.sqrt(batch.lr_ratio)}[mode]
    if mode == "none" or factor == 1.0:
        return
    before = full_rate(optimizer.param_groups[0])
    change_rates(optimizer, scheduler, lambda rate: rate * factor)
    notice(f"lr_scaling={mode}: learning rate {before:g} x {factor:g} = {before * factor:g}")


def build_scheduler(scheduler_or_factory: Any, optimizer: torch.optim.Optimizer, original: Any) -> Any:
    """Return the user's schedule bound to `optimizer`. A factory is called with `optimizer`."""
    if scheduler_or_factory is None:
        return None
    if isinstance(scheduler_or_factory, (LRScheduler, ReduceLROnPlateau)):
        bound = getattr(scheduler_or_factory, "optimizer", None)
        if bound is not optimizer and bound is not original:
            raise ConfigError(
                "the schedule belongs to another optimizer: build it from the optimizer that you pass, or pass a factory"
            )
        for schedule in _all_schedules(scheduler_or_factory):
            schedule.optimizer = optimizer
        return scheduler_or_factory
    if isinstance(scheduler_or_factory, RateCurve):
        return named_optimizers.CurveSchedule(optimizer, scheduler_or_factory)
    scheduler = scheduler_or_factory(optimizer)
    if not hasattr(scheduler, "step"):
        raise ConfigError(
            f"the scheduler factory returned a {type(scheduler).__name__}: return a schedule of torch.optim.lr_scheduler"
        )
    return scheduler


def _all_schedules(scheduler: Any) -> Iterator[Any]:
    """Yield a schedule and the schedules inside it (SequentialLR, ChainedScheduler)."""
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_schedules(inner)


def use_fused_sgd(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Switch plain SGD on CPU to its fused kernel, which takes a fifth of the time.

    Its results differ from those of the other kernels by rounding, and are the same in each run.

    An implementation that the user chose is kept. Sparse gradients and sharded parameters are excluded, because the
    kernel does not support them.
    """
    if type(optimizer) is not torch.optim.SGD or any(getattr(m, "sparse", False) for m in model.modules()):
        return
    for group in optimizer.param_groups:
        plain = group.get("foreach") is None and group.get("fused") is None and not group.get("differentiable")
        fits = all(
            p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and not is_sharded(p)
            for p in group["params"]
        )
        is_simple = not (group["momentum"] and group["dampening"]) and not isinstance(group["lr"], torch.Tensor)
        if plain and fits and is_simple:
            group["fused"] = True
    if any(group.get("fused") and group["momentum"] for group in optimizer.param_groups):
        optimizer._init_group = functools.partial(_init_group, optimizer)  # type: ignore[method-assign]


def _init_group(
    optimizer: torch.optim.SGD,
    group: dict[str, Any],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor | None],
) -> bool:
    """Collect the tensors of an update as `SGD._init_group` does, with momentum for a parameter whose first gradient comes late.

    Workaround (torch 2.13, no upstream issue known; may go when the fused SGD takes such parameters): its kernel fails if only some
    of the parameters have momentum. Zeros are the same as no momentum if there is no dampening.
    """
    has_sparse: bool = torch.optim.SGD._init_group(optimizer, group, params, grads, buffers)  # type: ignore[no-untyped-call]
    missing = [buffer is None for buffer in buffers]
    if any(missing) and not all(missing) and not group["dampening"]:
        buffers[:] = [torch.zeros_like(p) if b is None else b for p, b in zip(params, buffers, strict=True)]
    return has_sparse


def lean_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without the profiler label while no profiler runs. This saves 10 us per update.

    torch wraps each optimizer's step in `record_function` and the registered hooks (`profile_hook_step`). The full
    method is called if there are hooks or if a schedule has put its own wrapper on top.
    """
    bare = getattr(type(optimizer).step, "__wrapped__", None)
    if bare is None or "step" in vars(optimizer):
        return optimizer.step
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    module = sys.modules[torch.optim.Optimizer.__module__]
    hooks += [getattr(module, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
    if any(each is None for each in hooks):
        return optimizer.step

    def step() -> None:
        if any(hooks) or torch.autograd._profiler_enabled():
            optimizer.step()
        else:
            bare(optimizer)

    return step
