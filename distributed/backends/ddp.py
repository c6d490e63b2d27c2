"""Train with PyTorch DistributedDataParallel: every process has a full copy of the model, and gradients are all-reduced in buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from distributed.backends._torch.data_parallel import DDPObserver, DDPWrapper
from distributed.backends.base import If, Refusals
from distributed.backends.torch_base import PROCESS_GROUPS, TorchBackend
from distributed.config.fields import setting
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.state import Job


@dataclasses.dataclass(frozen=True)
class DDPOptions:
    """Settings of DistributedDataParallel, under torch's names."""

    find_unused_parameters: bool = setting(False, "search each step's graph for parameters that get no gradient")
    bucket_cap_mb: float | None = setting(
        None, "megabytes of gradients per all-reduce (default: torch's 25)", float, above=0
    )
    static_graph: bool = setting(False, "promise that the graph is the same in every step")
    comm_hook: str | None = setting(
        None, "how gradients are exchanged (default: one all-reduce per bucket)", str,
        choices=("fp16", "bf16", "powersgd", "topk", "hierarchical"),
    )  # fmt: skip
    powersgd_rank: int | None = setting(None, "rank of PowerSGD's approximation (default: torch's 1)", int, minimum=1)
    powersgd_start_step: int | None = setting(
        None, "updates with whole gradients before PowerSGD begins (default: torch's 1000)", int, minimum=2
    )
    topk_ratio: float | None = setting(
        None, "fraction of each gradient that topk sends (default: 0.01)", float, above=0, maximum=1
    )
    hierarchical_group_size: int | None = setting(
        None, "number of ranks that hierarchical sums first (default: those of a node)", int, minimum=2
    )


OF_HOOKS: Refusals = {
    "dtype=float64": (
        If(
            "with ddp.comm_hook='powersgd'",
            lambda own: own.options.comm_hook == "powersgd",
            "that hook is lossy: drop one of them",
        ),
    ),
    "mixed_precision=fp16": (
        If(
            "with ddp.comm_hook='powersgd' or 'topk'",
            lambda own: own.options.comm_hook in ("powersgd", "topk"),
            "their error feedback is in units of the loss scale, which changes: use mixed_precision='bf16', or"
            " ddp.comm_hook='fp16'",
        ),
    ),
}


class DDPBackend(TorchBackend[DDPOptions]):
    """Run the torch step with DistributedDataParallel around the model."""

    Options: ClassVar[type[Any]] = DDPOptions
    refuses_several: ClassVar[str] = ""
    observer: DDPObserver
    wrapper: DDPWrapper
    refuses: ClassVar[Refusals] = {**PROCESS_GROUPS, **OF_HOOKS}

    def __init__(self, merged: MergedConfig, options: DDPOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        _check_hook(options, plan)
        if options.static_graph and options.find_unused_parameters:
            raise ConfigError(
                "ddp.static_graph=true finds unused parameters by itself: drop ddp.find_unused_parameters"
            )
        self.observer = DDPObserver(self)
        self.wrapper = DDPWrapper(self)

    def check(self, job: Job, *, here: bool) -> None:
        super().check(job, here=here)
        for name in ("find_unused_parameters", "static_graph", "comm_hook"):
            if job.names and getattr(self.options, name):
                raise ConfigError(
                    f"ddp.{name} does not work with several models, which are trained without DistributedDataParallel: drop it"
                )

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        if self.wrapper.hook is not None and self.wrapper.hook.notice is not None:
            notices.append(self.wrapper.hook.notice)
        return notices

    def _wrapper_of_several(self) -> DDPWrapper:
        from distributed.backends._torch.reduced_together import ReducingWrapper

        return ReducingWrapper(self)

    def unwrap(self) -> None:
        super().unwrap()
        self.wrapper.close_hook()

    def save(self, directory: Path) -> dict[str, Any]:
        extra, hook = super().save(directory), self.wrapper.hook
        if hook is not None and hook.has_memory:
            memory = hook.save(directory, self.context.rank)
            extra["comm_hook"] = {"name": self.options.comm_hook, **memory}
        return extra

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        load, hook = super().load(directory, state), self.wrapper.hook

        def finish() -> None:
            load()
            if hook is None or not hook.has_memory:
                return
            kept, name = state.get("comm_hook") or {}, self.options.comm_hook
            if kept.get("name") == name and int(state["world_size"]) == self.context.world_size:
                hook.load(directory, self.context.rank, kept)
            else:
                self._notice(
                    f"the checkpoint has no state of ddp.comm_hook={name} for this world size: the hook starts without it"
                )

        return finish


def _check_hook(options: DDPOptions, plan: ProcessPlan) -> None:
    name = options.comm_hook
    for option in ("powersgd_rank", "powersgd_start_step", "topk_ratio", "hierarchical_group_size"):
        value, its_hook = getattr(options, option), option.partition("_")[0]
        if value is not None and name != its_hook:
            raise ConfigError(
                f"ddp.{option}={value} has no effect without ddp.comm_hook={its_hook!r}: set that hook, or drop this option"
            )
    if name == "powersgd" and options.bucket_cap_mb is not None:
        raise ConfigError(
            f"ddp.bucket_cap_mb={options.bucket_cap_mb} has no effect with ddp.comm_hook='powersgd', which takes all"
            " gradients in one bucket: drop one of them"
        )
    if options.hierarchical_group_size and plan.world_size % options.hierarchical_group_size:
        raise ConfigError(
            f"ddp.hierarchical_group_size={options.hierarchical_group_size} does not divide"
            f" world_size={plan.world_size}: use a divisor of it"
        )
