"""Put DeepSpeed's engine around a model, and observe it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends._deepspeed import config_file
from distributed.backends._torch.observer import TorchObserver
from distributed.backends._torch.wrapper import Wrapper

if TYPE_CHECKING:
    import torch

    from distributed.backends._deepspeed.cpu_adam import HostAdam
    from distributed.backends._deepspeed.engine import Engine
    from distributed.backends._deepspeed.held_slots import HeldSlots
    from distributed.backends._deepspeed.measured_collectives import MeasuredCollectives
    from distributed.backends._deepspeed.precision import EnginePrecision
    from distributed.backends._deepspeed.unused import FirstGradients
    from distributed.backends._torch.update import Update
    from distributed.backends.deepspeed import DeepSpeedBackend
    from distributed.config.plan import BatchPlan
    from distributed.loggers.profiling import Profiler
    from distributed.state import UpdateBatch


class DeepSpeedWrapper(Wrapper):
    """Put DeepSpeed's engine around the model from the first update of a fit to its end."""

    _backend: DeepSpeedBackend

    def __init__(self, backend: DeepSpeedBackend) -> None:
        super().__init__(backend)
        self._options = backend.options
        self.engine: Engine | None = None  # set at the first update, and kept after a fit
        self._precision: EnginePrecision | None = None
        self._host_adam: HostAdam | None = None
        self._measured: MeasuredCollectives | None = None  # set during a fit whose waiting is measured
        self._first_gradients: FirstGradients | None = None  # set until the first update of a fit is made
        self._batch: BatchPlan | None = None
        self.held: HeldSlots | None = None  # the optimizer's state of a checkpoint, until there is an engine

    def begin(self, batch: BatchPlan) -> None:
        """Store the batch plan of a new model, and forget the engine and the state of an earlier one."""
        self._batch, self.engine, self.held = batch, None, None

    def hold(self) -> HeldSlots | None:
        from distributed.backends._deepspeed.held_slots import HeldSlots

        own = self._backend.context
        self.held = HeldSlots(own.rank, own.world_size) if self._backend.stage else None
        return self.held

    def settle(self) -> None:
        """Give the optimizer its whole state, if there is no engine yet."""
        own = self._backend
        for parameter, slot, value in self.held or ():
            own.optimizer.state[parameter][slot] = value.whole(parameter.device)
        self.held = None

    def make_precision(self) -> EnginePrecision:
        from distributed.backends._deepspeed.precision import EnginePrecision

        own = self._backend
        self._precision = EnginePrecision(own.mixed_precision, own.device, own.config)
        return self._precision

    def make_update(self, optimizer: Any, schedule: Any) -> Update:
        from distributed.backends._deepspeed.update import EngineUpdate

        return EngineUpdate(self._backend, optimizer, schedule)

    def before_first_update(self, update_batch: UpdateBatch) -> torch.nn.Module:
        from distributed.backends._deepspeed import loading
        from distributed.backends._deepspeed.cpu_adam import HostAdam
        from distributed.backends._deepspeed.engine import Engine
        from distributed.backends._deepspeed.measured_collectives import MeasuredCollectives
        from distributed.backends._deepspeed.unused import FirstGradients
        from distributed.backends._torch.collective_timer import CollectiveTimer
        from distributed.backends._torch.generators import forked

        own = self._backend
        assert self._precision is not None
        with forked(own.device):
            self.engine = Engine(
                own.plain, own.optimizer, self._config(), own.world, self._precision.loss_scale, previous=self.engine, held=self.held
            )  # fmt: skip
        self.held = None
        loading.limit_waits(own.config.timeout_s)
        self._precision.engage(own.plain)
        self.engine.wrapper.train()
        names = {parameter: name for name, parameter in own.plain.named_parameters()}
        self._first_gradients = FirstGradients(names, self.engine.groups)
        if self._options.cpu_adam:
            self._host_adam = HostAdam(own.operator, own.optimizer)
        if own.observer.measures_collectives():
            own.observer.timer = CollectiveTimer(own.observer.waits)
            self._measured = MeasuredCollectives(own.observer.timer)
        wrapped: torch.nn.Module = self.engine.wrapper
        return wrapped

    def _config(self) -> dict[str, Any]:
        """Return DeepSpeed's complete config: the user's entries, replaced by ours where both exist."""
        own, batch = self._backend, self._batch
        assert batch is not None
        pinned = own.device.type == "cuda"
        zero: dict[str, Any] = {"stage": own.stage}
        for kind in ("optimizer", "param"):
            if self._options.offloads(kind):
                zero[f"offload_{kind}"] = {"device": "cpu"}
        ours: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch.batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
            "zero_optimization": zero,
            "gradient_clipping": (own.config.gradient_clipping or 0.0) if own.stage else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 60,  # our display shows the progress
        }
        if own.mixed_precision != "no":
            ours[own.mixed_precision] = {"enabled": True}
        kept = {name: value for name, value in own.own_config.items() if name not in ("optimizer", "train_batch_size")}
        config = config_file.merged(kept, ours)
        # Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#4875; may go when DeepSpeed makes no bucket larger than the model): it
        # allocates buckets at the start, by default of two GB.
        size = min(5 * 10**8, sum(p.numel() for p in own.plain.parameters()))
        zero = config["zero_optimization"]
        zero.setdefault("reduce_bucket_size", size)
        for kind in ("offload_optimizer", "offload_param"):
            if kind in zero:
                zero[kind].setdefault("pin_memory", pinned)
        return config

    def without_sync(self) -> contextlib.AbstractContextManager[None]:
        assert self.engine is not None
        return self.engine.accumulating()

    def backward(self, value: torch.Tensor) -> None:
        assert self.engine is not None
        self.engine.wrapper.backward(value, scale_wrt_gas=False)

    def exchange(self) -> None:
        if self._first_gradients is not None:
            self._first_gradients.check(self._backend.world.reduce)
            self._first_gradients = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Give the main process whole fp32 weights, and all ranks fp32 buffers, within the block. A collective: all
        ranks must call it."""
        weights = contextlib.nullcontext() if self.engine is None else self.engine.whole_weights()
        with weights, self.whole_buffers():
            yield

    def whole_buffers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the model's buffers are fp32."""
        assert self._precision is not None
        return self._precision.whole_buffers()

    def release(self) -> None:
        if self._measured is not None:
            self._measured.release()
            self._measured = None
        if self._host_adam is not None:
            self._host_adam.release()
            self._host_adam = None
        if self._first_gradients is not None:
            self._first_gradients.release()
            self._first_gradients = None
        if self.engine is not None:
            assert self._precision is not None
            self.engine.abandon()
            self._precision.release()


class DeepSpeedObserver(TorchObserver):
    """Observe DeepSpeed's engine."""

    _backend: DeepSpeedBackend

    @property
    def cuts_weights(self) -> bool:
        return self._backend.stage == 3

    def gradient_norm(self) -> float | None:
        own = self._backend
        if own.stage == 0 or own.wrapper.engine is None or own.wrapper.engine.is_released:
            return super().gradient_norm()
        return own.wrapper.engine.gradient_norm()

    def local_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights. Stage 3 gathers them on the main process, which is a collective."""
        own = self._backend
        if own.stage != 3 or own.wrapper.engine is None:
            yield from super().local_values()
            return
        with own.wrapper.engine.whole_weights():
            if own.context.is_main_process:
                yield from ((name, values.copy()) for name, values in super().local_values())

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._deepspeed.profiler import DeepSpeedProfiler

        own = self._backend
        return DeepSpeedProfiler(directory, own.context.rank, own.device, warmup, active, own.plain)
