"""PyTorch DistributedDataParallel: a full copy of the model in every process, gradients all-reduced in buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends.base import Job
from distributed.backends.torch_base import TorchBackend
from distributed.errors import ConfigError
from distributed.fields import setting
from distributed.plan import BatchPlan, ProcessPlan
from distributed.settings import MergedConfig
from distributed.state import Group, StepResult

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.powersgd import PowerSGD
    from distributed.backends._torch.world import World


@dataclasses.dataclass(frozen=True)
class DDPOptions:
    """Settings of DistributedDataParallel, under torch's names."""

    find_unused_parameters: bool = setting(False, "search each step's graph for parameters that get no gradient")
    bucket_cap_mb: float | None = setting(
        None, "megabytes of gradients per all-reduce (default: torch's 25)", float, above=0
    )
    static_graph: bool = setting(False, "promise that the graph is the same in every step")
    comm_hook: str | None = setting(None, "compress gradients on the wire", str, choices=("fp16", "bf16", "powersgd"))
    powersgd_rank: int | None = setting(None, "rank of PowerSGD's approximation (default: torch's 1)", int, minimum=1)
    powersgd_start_step: int | None = setting(
        None, "updates with whole gradients before PowerSGD begins (default: torch's 1000)", int, minimum=2
    )


class DDPBackend(TorchBackend[DDPOptions]):
    """The torch step with DistributedDataParallel around the model."""

    Options: ClassVar[type[Any]] = DDPOptions

    def __init__(self, merged: MergedConfig, options: DDPOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        if options.comm_hook == "powersgd" and merged.config.dtype == "float64":
            raise ConfigError("ddp.comm_hook='powersgd' is lossy, which contradicts dtype='float64': drop one of them")
        if options.comm_hook == "powersgd" and options.bucket_cap_mb is not None:
            raise ConfigError(
                f"ddp.bucket_cap_mb={options.bucket_cap_mb} has no effect with ddp.comm_hook='powersgd', which takes all"
                " gradients in one bucket: drop one of them"
            )
        for name in ("powersgd_rank", "powersgd_start_step"):
            if getattr(options, name) is not None and options.comm_hook != "powersgd":
                raise ConfigError(
                    f"ddp.{name}={getattr(options, name)} has no effect without ddp.comm_hook='powersgd': set it, or drop this"
                )
        if options.static_graph and options.find_unused_parameters:
            raise ConfigError(
                "ddp.static_graph=true finds unused parameters by itself: drop ddp.find_unused_parameters"
            )
        self._powersgd: PowerSGD | None = None

    def _join(self) -> World:
        from distributed.backends._torch.world import ProcessGroup

        return ProcessGroup(self.plan, self.config, lambda text: self.report({"kind": "warning", "text": text}))

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        if self._powersgd is not None:
            first = self._powersgd.first_compressed
            notices.append(f"ddp.comm_hook=powersgd compresses from update {first} on; gradients are whole before")
        return notices

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if not any(p.requires_grad for p in model.parameters()):
            return model  # build_optimizer says what is wrong
        options = self.options
        capacity = options.bucket_cap_mb
        if options.comm_hook == "powersgd":
            # With several buckets gloo mixes up the messages of PowerSGD's chained all-reduces (gloo::EnforceNotMet).
            capacity = 1 + sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            **_buffer_sync(DistributedDataParallel, any(True for _ in model.buffers())),
            gradient_as_bucket_view=True,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            bucket_cap_mb=capacity,
        )
        self._is_first_group = True
        if options.comm_hook is not None:
            self._register_hook(wrapped, options.comm_hook)
        return wrapped

    def _register_hook(self, wrapped: Any, name: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook: Callable[..., Any] = default_hooks.fp16_compress_hook if name == "fp16" else _bf16_hook
        if name == "powersgd":
            if self._powersgd is None:
                self._powersgd = _powersgd_of(wrapped.module, self.options)
            hook = self._powersgd.hook
        # DDP compares annotations with its own types, and ours are words (`from __future__ import annotations`).
        wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        if self.options.static_graph and self._is_first_group:
            # torch 2.13 aborts when the first backward of a static graph is not synchronised; sums stay the same.
            self._is_first_group = False
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._wrapped.no_sync()  # type: ignore[operator]
        return context

    def _before_first_update(self, group: Group) -> None:
        """After its first backward DDP orders its buckets anew, and three or more terms sum up differently in another
        order. A wrapper that goes on with a run learns the order in a pass without weight, before its first update."""
        is_further = self._step > 0 and self.context.world_size > 2
        if is_further and self._powersgd is None and not self.options.find_unused_parameters:
            self._weightless(group.micro_batches[0], group, None, [], False)
            self._is_first_group = False
            for parameter in self._parameters:
                parameter.grad = None
        self._watch_first_call()

    def _watch_first_call(self) -> None:
        """Gradients are exchanged for what the wrapper computes alone: a training_step may go around it."""
        self._is_unused = True
        wrapped: Any = self._wrapped
        enter = wrapped._pre_forward

        def called(*args: Any, **kwargs: Any) -> Any:
            self._is_unused = False
            del wrapped._pre_forward  # the method of the class again
            return enter(*args, **kwargs)

        wrapped._pre_forward = called

    def _finish_update(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        if self._is_unused:
            raise ConfigError(
                "training_step never called its argument `model`, so no gradient was exchanged between the processes: compute"
                " the loss from model(...), not from one of its parts or a model of the script"
            )
        try:
            self._wrapped.reducer._check_reducer_finalized()  # type: ignore[operator, union-attr]
        except RuntimeError as error:  # torch itself says it in the next forward, after an update with local gradients
            raise ConfigError(_unused(self.plain, str(error))) from None
        super()._finish_update(group, losses, result)

    def _on_non_finite(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        super()._on_non_finite(group, losses, result)
        if self._powersgd is not None:
            self._powersgd.forget()

    def save(self, directory: Path) -> dict[str, Any]:
        extra = super().save(directory)
        if self._powersgd is not None:
            extra["powersgd"] = self._powersgd.save(directory, self.context.rank)
        return extra

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        super().load(directory, state)
        if self._powersgd is None:
            return
        if state.get("powersgd") and int(state["world_size"]) == self.context.world_size:
            self._powersgd.load(directory, self.context.rank, state["powersgd"])
        else:
            self._notice("the checkpoint has no powersgd memory for this world size: it starts anew")


def _buffer_sync(wrapper: Any, has_buffers: bool) -> dict[str, Any]:
    """No broadcast of buffers before each forward where there are none; the word for it changed in torch 2.13."""
    if has_buffers:
        return {}
    has_new_word = "forward_sync_buffers" in inspect.signature(wrapper.__init__).parameters
    return {"forward_sync_buffers" if has_new_word else "broadcast_buffers": False}


def _powersgd_of(model: torch.nn.Module, options: DDPOptions) -> PowerSGD:
    from distributed.backends._torch.powersgd import PowerSGD
    from distributed.backends._torch.tensors import named_parameters

    parameters = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    kinds = sorted({str(p.dtype) for _, p in parameters})
    if len(kinds) > 1:
        raise ConfigError(
            f"ddp.comm_hook='powersgd' takes all gradients in one bucket, and the model's are {' and '.join(kinds)}:"
            " use ddp.comm_hook='bf16'"
        )
    return PowerSGD(parameters, options.powersgd_rank, options.powersgd_start_step)


def _unused(model: torch.nn.Module, error: str) -> str:
    """Our words for torch's "Expected to have finished reduction", which names parameters by their number."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = [trainable[int(index)] for index in found[1].split()] if found else []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"no gradient for {', '.join(names[:3]) or 'some parameters'}{more}: a forward that does not use every parameter needs"
        " ddp.find_unused_parameters=true (--set ddp.find_unused_parameters=true), or requires_grad=False on those"
    )


def _bf16_hook(state: Any, bucket: Any) -> Any:
    """Gradients as bfloat16 on the wire. torch's own hook refuses gloo, whose bfloat16 all-reduce works."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    compressed = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

    def decompress(done: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        return buffer.copy_(done.value()[0])

    return future.then(decompress)
