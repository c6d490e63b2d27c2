"""Wrap a model in DistributedDataParallel, choose what it exchanges and detect its failures."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed.backends._torch.observer import TorchObserver
from distributed.backends._torch.waits import DDPWaits
from distributed.backends._torch.wrapper import Wrapper
from distributed.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.comm_hooks import CommHook
    from distributed.backends.ddp import DDPBackend, DDPOptions
    from distributed.state import UpdateBatch

_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"  # the attribute of the model that DDP reads


class DDPWrapper(Wrapper):
    """Wrap the model in DistributedDataParallel, which exchanges gradients in the backward pass."""

    _backend: DDPBackend

    def __init__(self, backend: DDPBackend) -> None:
        super().__init__(backend)
        self._options = backend.options
        self.hook: CommHook | None = None
        self._watched: _TwiceWatch | None = None  # set during the first update
        self._sparse: list[torch.nn.Parameter] = []
        self._is_first_update_batch = False
        self._is_unused = False

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if not any(p.requires_grad for p in model.parameters()):
            return model  # `build_optimizer` raises the error
        options, own = self._options, self._backend
        capacity = options.bucket_cap_mb
        if options.comm_hook == "powersgd":
            # Workaround (torch 2.13, no upstream issue known; may go when gloo keeps such all-reduces apart): with
            # several buckets gloo mixes up the messages of PowerSGD's chained all-reduces (gloo::EnforceNotMet).
            capacity = 1 + sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        with self._leaving_out_sparse(model):
            wrapped = DistributedDataParallel(
                model,
                device_ids=[own.device.index] if own.device.type == "cuda" else None,
                **_buffer_sync(DistributedDataParallel, any(True for _ in model.buffers())),
                gradient_as_bucket_view=True,
                find_unused_parameters=options.find_unused_parameters,
                static_graph=options.static_graph,
                bucket_cap_mb=capacity,
            )
        self._is_first_update_batch = True
        own.observer.begin(wrapped)
        if options.comm_hook is not None:
            hook = self.hook = self.hook or self._make_hook(options.comm_hook, model)
            # Workaround (torch 2.13, no upstream issue known; may go when DDP resolves annotations that are strings):
            # DDP compares annotations with types, but those of this module are strings (`from __future__ import
            # annotations`). A lambda has no annotations.
            wrapped.register_comm_hook(None, lambda state, bucket: hook.average(bucket))
        return wrapped

    @contextlib.contextmanager
    def _leaving_out_sparse(self, model: torch.nn.Module) -> Iterator[None]:
        """Exclude sparse gradients from a DDP wrapper made in this block. `sparse.average` exchanges them instead.

        Workaround (torch 2.13, no upstream issue known; may go when DDP exchanges sparse and dense gradients
        correctly): DDP exchanges a sparse gradient correctly only if it is the only gradient, so one name stays if all
        are sparse.
        """
        from distributed.backends._torch.modules import sparse_names

        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        names = sorted(sparse_names(model) & trained.keys())
        if len(names) == len(trained):
            names = names[1:]
        self._sparse = [trained[name] for name in names]
        for parameter in self._sparse:  # DDP broadcasts all other parameters itself
            self._backend.world.copy_from(parameter.detach(), 0)
        own = vars(model).get(_LEFT_OUT)
        setattr(model, _LEFT_OUT, names)
        try:
            yield
        finally:  # or a wrapper made by the user would exclude them too
            delattr(model, _LEFT_OUT) if own is None else setattr(model, _LEFT_OUT, own)

    def _make_hook(self, name: str, model: torch.nn.Module) -> CommHook:
        """Return the hook that `ddp.comm_hook` names."""
        import torch

        from distributed.backends._torch import comm_hooks
        from distributed.backends._torch.tensors import named_parameters
        from distributed.backends._torch.topk import TopK

        if name in ("fp16", "bf16"):
            return comm_hooks.Cast(torch.float16 if name == "fp16" else torch.bfloat16)
        if name == "hierarchical":
            groups = comm_hooks.near_ranks(self._backend.world, self._options.hierarchical_group_size)
            return comm_hooks.Hierarchical(groups, self._backend.config.timeout_s)
        parameters = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
        if name == "topk":
            return TopK(parameters, self._options.topk_ratio)
        return _powersgd_of(parameters, self._options)

    def release(self) -> None:
        self._backend.observer.end()

    def close_hook(self) -> None:
        """Close the hook, unless it has state that the next fit continues with. Call it after DDP has been dropped."""
        if self.hook is not None and not self.hook.has_memory:
            self.hook.close()
            self.hook = None

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        if self._options.static_graph and self._is_first_update_batch:
            # Workaround (torch 2.13, pytorch/pytorch#143580; may go when the oldest supported torch has
            # pytorch/pytorch#187732): torch aborts if the first backward of a static graph is not synchronised. The
            # sums stay the same.
            self._is_first_update_batch = False
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._backend.wrapped.no_sync()
        return context

    def before_first_update(self, update_batch: UpdateBatch) -> torch.nn.Module:
        """Let DDP order its buckets before a new wrapper continues a run.

        DDP reorders its buckets after its first backward, and sums of three or more terms depend on that order. A
        wrapper that continues a run therefore learns the order in a pass with zero weight before its first update.
        """
        own = self._backend
        is_further = own.update.step > 0 and own.context.world_size > 2
        has_memory = self.hook is not None and self.hook.has_memory
        if is_further and not has_memory and not self._options.find_unused_parameters:
            with own.kind.without_draws():
                own.passes.weightless(update_batch.micro_batches[0], update_batch, None, [], False)
            self._is_first_update_batch = False
            for parameter in own.update.parameters:
                parameter.grad = None
        self._watch_first_call()
        # With a static graph DDP itself waits for all pieces of a gradient.
        self._watched = None if self._options.static_graph else _TwiceWatch(own.plain)
        return super().before_first_update(update_batch)

    def backward(self, value: torch.Tensor) -> None:
        super().backward(value)
        if self._watched is not None:
            self._watched.end_backward()

    def _watch_first_call(self) -> None:
        """Record whether the wrapper is called.

        DDP exchanges gradients only for calls of the wrapper, and a training_step may bypass it.
        """
        self._is_unused = True
        wrapped: Any = self._backend.wrapped
        enter = wrapped._pre_forward

        def called(*args: Any, **kwargs: Any) -> Any:
            self._is_unused = False
            del wrapped._pre_forward  # restore the method of the class
            return enter(*args, **kwargs)

        wrapped._pre_forward = called

    def exchange(self) -> None:
        own = self._backend
        if self._is_unused and own.own_steps is not None:
            raise ConfigError(
                "the model that prepare() returned was never called, so no gradient was exchanged between the processes: compute the"
                " loss from its outputs, model(...), not from one of its parts or from the model that was passed"
            )
        if self._is_unused:
            raise ConfigError(
                "training_step never called its argument `model`, so no gradient was exchanged between the processes: compute"
                " the loss from model(...), not from one of its parts or a model of the script"
            )
        if self._watched is not None:
            self._watched.close()
            self._watched = None
        # Workaround (torch 2.13, no upstream issue known; may go when DDP raises this error before the update): torch
        # raises it in the next forward only, one unsynchronised update too late.
        try:
            own.wrapped.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise ConfigError(_unused(own.plain, str(error))) from None
        if self._sparse:
            from distributed.backends._torch import sparse

            sparse.average(self._sparse, own.world)

    def after_non_finite(self) -> None:
        if self.hook is not None:
            self.hook.forget()


_MEASURED_ON_CPU = 10  # one update in so many is measured on CPUs, which costs less than the noise of a step


class DDPObserver(TorchObserver):
    """Observe DistributedDataParallel, which measures its own waiting time."""

    def __init__(self, backend: DDPBackend) -> None:
        super().__init__(backend)
        self._wrapped: Any = None
        # Seconds that an update has waited for the number of labels of all ranks, for the newest updates.
        self._waits_for_counts: collections.deque[float] = collections.deque(maxlen=100)
        self._waits, self._new_waits = DDPWaits(), DDPWaits()

    def begin(self, wrapped: Any) -> None:
        """Start to observe a new wrapper."""
        # On a GPU, the host waits for the device before each forward pass that torch measures.
        every = _MEASURED_ON_CPU if self._backend.device.type == "cpu" else 100
        wrapped._set_ddp_runtime_logging_sample_rate(every)
        self._wrapped, self._waits, self._new_waits = wrapped, DDPWaits(every), DDPWaits(every)

    def end(self) -> None:
        """Release the wrapper."""
        self._wrapped = None

    def add_wait_for_count(self, seconds: float) -> None:
        self._waits_for_counts.append(seconds)

    def waited_s(self) -> float | None:
        """Return the waiting time that torch measured, in seconds.

        torch measures the first ten updates of a wrapper, and then one in ten on CPUs and one in a hundred on GPUs.
        """
        return super().waited_s() if self._wrapped is None else self._waits.take(self._wrapped._get_ddp_logging_data())

    def newly_waited_s(self) -> float | None:
        new = None if self._wrapped is None else self._new_waits.take_new(self._wrapped._get_ddp_logging_data())
        if new is None:
            return None
        counts, number = sum(self._waits_for_counts), len(self._waits_for_counts)
        self._waits_for_counts.clear()
        return new + counts / max(number, 1)


class _TwiceWatch:
    """Detect parameters whose gradient arrives twice in one backward pass of the first update.

    Workaround (torch 2.13, no upstream issue known; may go when DDP averages both pieces or raises an error): DDP
    averages only the first of the two pieces and silently loses the second.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen: set[str] = set()
        self._twice: list[str] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(functools.partial(self._see, name))  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters()
            if p.requires_grad
        ]

    def _see(self, name: str, parameter: torch.Tensor) -> None:
        if name in self._seen:
            self._twice.append(name)
        self._seen.add(name)

    def end_backward(self) -> None:
        """Raise ConfigError if a parameter received two pieces of a gradient."""
        self._seen.clear()
        if self._twice:
            raise ConfigError(
                f"{min(self._twice)} got a second gradient in one backward pass, as happens if parts that share it are recomputed with"
                " use_reentrant=True: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or set"
                " ddp.static_graph=true"
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _buffer_sync(wrapper: Any, has_buffers: bool) -> dict[str, Any]:
    """Return arguments that turn off DDP's broadcast of buffers before each forward if there are no buffers.

    torch before 2.13 has the argument under its old name.
    """
    if has_buffers:
        return {}
    has_new_word = "forward_sync_buffers" in inspect.signature(wrapper.__init__).parameters
    return {"forward_sync_buffers" if has_new_word else "broadcast_buffers": False}


def _powersgd_of(parameters: list[tuple[str, torch.nn.Parameter]], options: DDPOptions) -> CommHook:
    from distributed.backends._torch.powersgd import PowerSGD

    kinds = sorted({str(p.dtype) for _, p in parameters})
    if len(kinds) > 1:
        raise ConfigError(
            f"ddp.comm_hook='powersgd' puts all gradients into one bucket, but the model's are {' and '.join(kinds)}:"
            " use ddp.comm_hook='bf16'"
        )
    return PowerSGD(parameters, options.powersgd_rank, options.powersgd_start_step)


def _unused(model: torch.nn.Module, error: str) -> str:
    """Return an error message that names the parameters.

    torch's own message ("Expected to have finished reduction") lists their indices.
    """
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = [trainable[int(index)] for index in found[1].split()] if found else []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"no gradient for {', '.join(names[:3]) or 'some parameters'}{more}: a forward that does not use every parameter needs"
        " ddp.find_unused_parameters=true (--set ddp.find_unused_parameters=true), or requires_grad=False on the unused ones"
    )
