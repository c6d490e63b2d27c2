"""Train with PyTorch FSDP2 (`fully_shard`): parameters, gradients and optimizer state are sharded over the processes, layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._torch.observer import TorchObserver
from distributed.backends._torch.wrapper import Wrapper
from distributed.backends.base import Refusals
from distributed.backends.torch_base import OF_WHOLE_MATRICES, PROCESS_GROUPS, TorchBackend
from distributed.config.fields import setting
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.state import Job

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.gradients import Gradients
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.whole import WholeForm
    from distributed.backends._torch.world import TorchWorld


@dataclasses.dataclass(frozen=True)
class FSDPOptions:
    """Settings of fully_shard."""

    wrap_classes: str | None = setting(
        None,
        "names of module classes to shard on their own, separated by commas (default: a network's repeated layers)",
        str,
    )
    min_num_params: int | None = setting(
        None, "shard on their own the smallest modules with at least this many parameters", int, minimum=1
    )
    reshard_after_forward: bool = setting(True, "free gathered parameters between forward and backward: less memory")
    cpu_offload: bool = setting(False, "keep parameters, gradients and optimizer state in host memory")
    reduce_dtype: str = setting(
        "float32",
        "element type in which gradients are summed under mixed precision",
        str,
        choices=("float32", "bfloat16"),
    )


class FSDPBackend(TorchBackend[FSDPOptions]):
    """Run the torch step on a sharded model. The optimizer is built after sharding."""

    Options: ClassVar[type[Any]] = FSDPOptions
    refuses_several: ClassVar[str] = ""
    observer: FSDPObserver
    wrapper: FSDPWrapper
    refuses: ClassVar[Refusals] = {**PROCESS_GROUPS, **OF_WHOLE_MATRICES}
    refuses_keras: ClassVar[str] = "fully_shard replaces the parameters under Keras's variables; use pytorch-ddp"

    def __init__(self, merged: MergedConfig, options: FSDPOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        if options.wrap_classes is not None and options.min_num_params is not None:
            raise ConfigError(
                f"fsdp.wrap_classes={options.wrap_classes!r} and fsdp.min_num_params={options.min_num_params} both set what"
                " is sharded on its own: drop one of them"
            )
        if options.reduce_dtype != "float32" and self.mixed_precision == "no":
            raise ConfigError(
                f"fsdp.reduce_dtype={options.reduce_dtype!r} has no effect without mixed_precision: set mixed_precision='bf16',"
                " or drop it"
            )
        self.observer = FSDPObserver(self)
        self.wrapper = FSDPWrapper(self)

    def _join(self) -> TorchWorld:
        from distributed.backends._torch.world import ProcessGroup

        both = "cpu:gloo,cuda:nccl" if self.plan.device == "cuda" else None
        return ProcessGroup(self.plan, self.config, self._warn, both)

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        self.wrapper.forget_whole_parameters()
        if self.options.cpu_offload and self.device.type == "cpu":
            notices.append("fsdp.cpu_offload frees no memory here: on CPUs all parameters are in host memory")
        return notices

    def reassemble(self) -> None:
        """Make the model whole on this rank's device, if every rank has memory for it twice. A collective."""
        whole = self.wrapper.whole
        assert whole is not None
        if not whole.is_current:
            if not self.wrapper.has_room(whole.num_bytes):
                return
            whole.gather(self.device)
        whole.show(self.device)

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        form = self.wrapper.whole
        was_in_pieces = form is not None and not form.is_shown  # during a fit, or because there is too little memory
        if form is not None:
            form.hide()
        try:
            yield
        except BaseException:
            if form is not None and not was_in_pieces and form.is_current:
                form.show(self.device)
            raise
        if not was_in_pieces:
            self.reassemble()

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        from distributed.backends._torch.whole import whole_for_a_while

        if self.wrapper.whole is None or self.wrapper.whole.is_shown:
            with super().whole_model() as model:
                yield model
            return
        with whole_for_a_while(self.plain, is_main=self.context.is_main_process) as model:
            yield model


class FSDPWrapper(Wrapper):
    """Shard the model with `fully_shard`, which exchanges parameters and gradients around each layer."""

    _backend: FSDPBackend

    def __init__(self, backend: FSDPBackend) -> None:
        super().__init__(backend)
        self._options = backend.options
        self.whole: WholeForm | None = None  # whole form of the model, set when it is sharded
        self._replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._is_too_large = False  # whether the user was told that the whole model does not fit

    def build(self, model_or_factory: Any) -> torch.nn.Module:
        from distributed.backends._torch import fully_sharded

        own = self._backend
        return fully_sharded.build(model_or_factory, own.config, own.device, is_main=own.context.is_main_process)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from distributed.backends._torch import fully_sharded

        if self.whole is not None:  # sharded by an earlier fit or evaluation of this trainer
            self.whole.hide()
            self.whole.release()
            return model
        from distributed.backends._torch.collective_timer import CollectiveTimer
        from distributed.backends._torch.whole import WholeForm

        before = list(model.parameters())
        own = self._backend
        for part in self._outermost(model):
            fully_sharded.shard(part, self._options, own.device, own.mixed_precision, own.plan.axes)
        if own.observer.measures_collectives():
            own.observer.timer = CollectiveTimer(own.observer.waits)
            fully_sharded.measure_collectives(model, own.observer.timer)
        self._replaced = dict(zip(before, model.parameters(), strict=True))
        self.whole = WholeForm(model)
        return model

    def forget_whole_parameters(self) -> None:
        """Free the parameters from before sharding. The optimizer refers to the sharded ones by then."""
        self._replaced = {}

    def compile(self) -> None:
        from distributed.backends._torch import fully_sharded

        fully_sharded.compile_forwards(self._backend.plain)

    def bind(self, optimizer: Any) -> Any:
        from distributed.backends._torch import fully_sharded

        return fully_sharded.rebind(optimizer, self._replaced)

    def make_precision(self) -> Precision:
        precision = super().make_precision()
        if self._options.cpu_offload:
            precision.keep_scale_on(self._backend.torch.device("cpu"))
        return precision

    def make_gradients(self, parameters: list[torch.nn.Parameter]) -> Gradients:
        from distributed.backends._torch.fully_sharded import ShardedGradients

        return ShardedGradients(parameters, self._backend.plain, self._backend.device)

    def free_gathered(self) -> None:
        assert self.whole is not None
        self.whole.reshard()

    def _outermost(self, model: torch.nn.Module) -> list[Any]:
        """Return the modules that are sharded by themselves and lie in no other: the model, or each of several models."""
        return [model] if self._backend.kind.is_one_model else list(model.children())

    @contextlib.contextmanager
    def outermost_gathered(self) -> Iterator[None]:
        outermost = self._outermost(self._backend.plain)
        for part in outermost:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in outermost:
                part.set_reshard_after_forward(self._options.reshard_after_forward, recurse=False)
                part.reshard()

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        wrapped = self._backend.wrapped
        wrapped.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.set_requires_gradient_sync(True)

    def backward_of(self, value: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        # `inputs` would have to name the gathered parameters, which fully_shard does not expose. The gradients that the
        # other models get are dropped.
        others = set(self._backend.update.parameters).difference(parameters)
        kept = {parameter: parameter.grad for parameter in others}
        for parameter in others:
            parameter.grad = None
        value.backward()  # type: ignore[no-untyped-call]
        for parameter, gradient in kept.items():
            parameter.grad = gradient

    def has_room(self, num_bytes: int) -> bool:
        """Return whether all ranks have memory for the whole model twice. Show a notice the first time that a rank has
        too little. A collective."""
        from distributed.backends._torch import whole

        own = self._backend
        free = whole.free_bytes(own.device, own.context.local_world_size)
        lacking = sum(own.world.reduce({"lacking": float(2 * num_bytes > free)}).values())
        if lacking and not self._is_too_large:
            self._is_too_large = True
            own._notice(
                "trainer.model stays sharded: not every process has memory for two copies of the whole model; 'with trainer.whole_model():'"
                " gathers it on the main process"
            )
        return not lacking


class FSDPObserver(TorchObserver):
    """Observe a sharded model."""

    @property
    def cuts_weights(self) -> bool:
        return True
