"""PyTorch FSDP2 (`fully_shard`): parameters, gradients and optimizer state are cut over the processes, layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._torch.observer import TorchObserver
from distributed.backends.torch_base import TorchBackend
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


@dataclasses.dataclass(frozen=True)
class FSDPOptions:
    """Settings of fully_shard."""

    wrap_classes: str | None = setting(
        None, "names of module classes to shard on their own, with commas (default: a network's repeated layers)", str
    )
    min_num_params: int | None = setting(
        None, "shard each smallest module with at least so many parameters on its own", int, minimum=1
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
    """The torch step over a sharded model. The optimizer is built after sharding."""

    Options: ClassVar[type[Any]] = FSDPOptions
    refuses_keras: ClassVar[str] = "fully_shard replaces the parameters under Keras's variables; use pytorch-ddp"

    def __init__(self, merged: MergedConfig, options: FSDPOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        if options.wrap_classes is not None and options.min_num_params is not None:
            raise ConfigError(
                f"fsdp.wrap_classes={options.wrap_classes!r} and fsdp.min_num_params={options.min_num_params} both say what"
                " is sharded on its own: drop one of them"
            )
        if options.reduce_dtype != "float32" and self.mixed_precision == "no":
            raise ConfigError(
                f"fsdp.reduce_dtype={options.reduce_dtype!r} has no effect without mixed_precision: set mixed_precision='bf16',"
                " or drop it"
            )
        self._replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._whole: WholeForm | None = None  # of the model, once it is sharded
        self._is_too_large = False  # and that was said
        self.observer = FSDPObserver(self)

    def _transport(self) -> str | None:
        return "cpu:gloo,cuda:nccl" if self.plan.device == "cuda" else None

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        notices = super().prepare(job, batch)
        self._replaced = {}  # the optimizer follows the pieces by now, and the whole parameters need memory
        if self.options.cpu_offload and self.device.type == "cpu":
            notices.append("fsdp.cpu_offload frees nothing here: on CPUs all parameters are in host memory")
        return notices

    def _build(self, given: Any) -> torch.nn.Module:
        from distributed.backends._torch import fully_sharded

        return fully_sharded.build(given, self.config, self.device, is_main=self.context.is_main_process)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from distributed.backends._torch import fully_sharded

        if self._whole is not None:  # by an earlier fit or evaluation of this trainer
            self._whole.hide()
            self._whole.release()
            return model
        from distributed.backends._torch.whole import WholeForm

        before = list(model.parameters())
        fully_sharded.shard(model, self.options, self.device, self.mixed_precision)
        self._replaced = dict(zip(before, model.parameters(), strict=True))
        self._whole = WholeForm(model)
        return model

    def _compile(self) -> None:
        from distributed.backends._torch import fully_sharded

        fully_sharded.compile_forwards(self.plain)

    def _bind(self, optimizer: Any) -> Any:
        from distributed.backends._torch import fully_sharded

        return fully_sharded.rebind(optimizer, self._replaced)

    def _make_precision(self) -> Precision:
        precision = super()._make_precision()
        if self.options.cpu_offload:
            precision.keep_scale_on(self.torch.device("cpu"))
        return precision

    def _make_gradients(self) -> Gradients:
        from distributed.backends._torch.fully_sharded import ShardedGradients

        return ShardedGradients(self._parameters, self.plain, self.device)

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._wrapped.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self._wrapped.set_requires_gradient_sync(True)  # type: ignore[operator]

    # ------------------------------------------------------------------ the whole model

    def reassemble(self) -> None:
        """Make the model whole on this rank's device, if every rank has room for it twice."""
        assert self._whole is not None
        if not self._whole.is_current:
            if not self._has_room(self._whole.num_bytes):
                return
            self._whole.gather(self.device)
        self._whole.show(self.device)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether all ranks have. A collective."""
        from distributed.backends._torch import whole

        free = whole.free_bytes(self.device, self.context.local_world_size)
        lacking = sum(self.world.reduce({"lacking": float(2 * num_bytes > free)}).values())
        if lacking and not self._is_too_large:
            self._is_too_large = True
            self._notice(
                "trainer.model stays in pieces: the whole does not fit into each process twice; 'with trainer.whole_model():'"
                " gathers it on the main process"
            )
        return not lacking

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        form = self._whole
        was_in_pieces = form is not None and not form.is_shown  # within a fit, or where there is no room
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

        if self._whole is None or self._whole.is_shown:
            with super().whole_model() as model:
                yield model
            return
        with whole_for_a_while(self.plain, is_main=self.context.is_main_process) as model:
            yield model


class FSDPObserver(TorchObserver):
    """Observe a sharded model."""

    @property
    def cuts_weights(self) -> bool:
        return True
