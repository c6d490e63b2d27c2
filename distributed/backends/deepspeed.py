"""DeepSpeed: ZeRO's stages 0 to 3 behind the one torch step, with optimizer and parameters in host memory where asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._deepspeed import config_file
from distributed.backends._torch.observer import TorchObserver
from distributed.backends.base import If, Refusals
from distributed.backends.effects import SEVERAL_PROCESSES, Need
from distributed.backends.torch_base import PROCESS_GROUPS, TorchBackend
from distributed.config.fields import setting
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.state import Group, Job, StepResult, WorkerContext

if TYPE_CHECKING:
    import torch

    from distributed.backends._deepspeed.engine import Engine
    from distributed.backends._deepspeed.precision import EnginePrecision
    from distributed.backends._deepspeed.unused import FirstGradients
    from distributed.backends._torch.objective import Loss
    from distributed.loggers.profiling import Profiler

_DEFAULT_STAGE = 2
_AT_STAGE_0 = If(
    "with zero_stage=0", lambda own: own.options.stage == 0, "set zero_stage=1, 2 or 3, or use backend 'pytorch-ddp'"
)
_WAITS = Need(
    "several processes, or deepspeed.cpu_adam",  # whose compilation may be under way elsewhere
    lambda where, name: "" if where.backend.options.cpu_adam else SEVERAL_PROCESSES.lacks(where, name),
)
HAS_FP16_ON_CPU = False  # DeepSpeed asks oneDNN, which needs AVX512-FP16 or AMX; too rare to be asked for


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptions:
    """Settings of DeepSpeed, and a DeepSpeed config beside them."""

    zero_stage: int | None = setting(
        None,
        "what is cut over the processes: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (default: 2)",
        int,
        minimum=0,
        maximum=3,
    )
    offload_optimizer: bool | None = setting(
        None, "keep optimizer state and fp32 parameters in host memory, updated there", bool
    )
    offload_param: bool | None = setting(None, "keep parameters in host memory between their uses (zero_stage 3)", bool)
    cpu_adam: bool = setting(False, "DeepSpeed's C++ Adam for an offloaded optimizer, compiled once (minutes)")
    native_checkpoint: bool = setting(
        False,
        "write DeepSpeed's own files, which are pickles, into each checkpoint too, for its tools (zero_stage 1 to 3)",
    )
    deepspeed_config: dict[str, Any] | None = setting(
        None,
        "a DeepSpeed config: a dict, the path of a JSON file or a DeepSpeedConfig; 'auto' takes our values",
        dict,
        convert=config_file.read,
    )

    def __post_init__(self) -> None:
        own = self.deepspeed_config or {}
        config_file.check(own)
        for name, where, theirs in self._in_both(own):
            if (ours := getattr(self, name)) is not None and ours != theirs:
                raise ConfigError(f"deepspeed.{name}={ours} is not {where}: make them agree, or drop one")
        if self.offloads("param") and self.stage != 3:
            raise ConfigError(
                f"offloading parameters needs zero_stage=3, not {self.stage}: set it, or drop offload_param"
            )
        if self.offloads("optimizer") and self.stage == 0:
            raise ConfigError(
                "offloading the optimizer needs zero_stage=1, 2 or 3, not 0: set it, or drop offload_optimizer"
            )
        if self.native_checkpoint and self.stage == 0:
            raise ConfigError(
                "deepspeed.native_checkpoint=True needs zero_stage=1, 2 or 3, not 0, of which DeepSpeed's tools open nothing:"
                " set one, or drop it (model/*.safetensors holds the whole weights)"
            )
        if self.cpu_adam and not self.offloads("optimizer"):
            raise ConfigError(
                "deepspeed.cpu_adam=True updates an offloaded optimizer: set offload_optimizer=True, or drop it"
            )

    @staticmethod
    def _in_both(own: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """(option, where, the config's value) of what an option and a DeepSpeed config both can say."""
        if (stage := config_file.at(own, ("zero_optimization", "stage"))) is not None:
            yield "zero_stage", f"deepspeed_config.zero_optimization.stage={stage}", stage
        for kind in ("optimizer", "param"):
            section = f"offload_{kind}"
            if (device := config_file.at(own, ("zero_optimization", section, "device"))) is not None:
                yield section, f"deepspeed_config.zero_optimization.{section}.device={device!r}", device == "cpu"

    @property
    def stage(self) -> int:
        """The stage in effect. A config without one means what DeepSpeed means by it: 0."""
        own = self.deepspeed_config
        if self.zero_stage is not None or own is None:
            return _DEFAULT_STAGE if self.zero_stage is None else self.zero_stage
        return int(config_file.at(own, ("zero_optimization", "stage")) or 0)

    def offloads(self, kind: str) -> bool:
        """Whether "optimizer" or "param" lie in host memory."""
        device = config_file.at(self.deepspeed_config or {}, ("zero_optimization", f"offload_{kind}", "device"))
        return bool(getattr(self, f"offload_{kind}")) or device == "cpu"

    def implied(self) -> Iterator[tuple[str, str, Any]]:
        """(where, setting, value) for what the DeepSpeed config says of our settings."""
        return config_file.implied(self.deepspeed_config or {})


class DeepSpeedBackend(TorchBackend[DeepSpeedOptions]):
    """The torch step through DeepSpeed's engine.

    The model and its optimizer are plain until the first update of a fit, and the model is again after it: what is written and
    read in between is what every backend writes and reads.
    """

    Options: ClassVar[type[Any]] = DeepSpeedOptions
    observer: DeepSpeedObserver
    refuses_keras: ClassVar[str] = "its engine replaces the parameters under Keras's variables; use pytorch-ddp"
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {"start_timeout": (_WAITS,)}
    refuses: ClassVar[Refusals] = {
        **PROCESS_GROUPS,
        "dtype=float64": "its engine has no float64, and ZeRO keeps parameters in float32: use backend 'fsdp'",
        "mixed_precision=fp16": (
            If("on CPUs", lambda own: own.plan.device == "cpu" and not HAS_FP16_ON_CPU, "set mixed_precision='bf16'"),
            _AT_STAGE_0,
        ),
        "mixed_precision=bf16": (_AT_STAGE_0,),
        "compile": "its hooks would break the compiled graph at every module: use backend 'pytorch-ddp' or 'fsdp'",
    }

    def __init__(self, merged: MergedConfig, options: DeepSpeedOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.stage = options.stage
        self._own = options.deepspeed_config or {}
        kind = self.mixed_precision
        if config_file.at(self._own, (kind, "enabled")) is False:
            raise ConfigError(
                f"mixed_precision={kind!r} is not deepspeed_config.{kind}.enabled=False: drop one of them"
            )
        self.engine: Engine | None = None
        self._host_adam: Any = None
        self.observer = DeepSpeedObserver(self)
        self._first_gradients: FirstGradients | None = None  # until the first update of a fit is made

    # ------------------------------------------------------------------ set-up

    def setup(self) -> WorkerContext:
        from distributed.backends._deepspeed import cpu_adam, loading

        loading.load(self.plan.device)
        context = super().setup()
        if self.options.cpu_adam:
            self._operator = cpu_adam.load(self.config.start_timeout, self._say)
        return context

    def _say(self, text: str) -> None:
        self.report({"kind": "notice", "text": text})

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        self._batch, self.engine = batch, None
        notices = super().prepare(self._with_own_optimizer(job), batch)
        self._check_trainable_kinds()
        if self.device.type == "cpu" and (self.options.offloads("optimizer") or self.options.offloads("param")):
            notices.append("offloading frees nothing here: on CPUs all memory is the host's")
        return notices

    def _with_own_optimizer(self, job: Job) -> Job:
        """`job` with the optimizer that the DeepSpeed config asks for."""
        asked = config_file.adam(self._own, self.config.learning_rate)
        if asked is None:
            return job
        if job.optimizer is not None:
            raise ConfigError(
                "Trainer(optimizer=) and deepspeed_config.optimizer both say what the optimizer is: drop one"
            )
        kind, arguments = asked
        return dataclasses.replace(job, optimizer=functools.partial(getattr(self.torch.optim, kind), **arguments))

    def _check_trainable_kinds(self) -> None:
        from distributed.backends._deepspeed import engine
        from distributed.backends._torch.modules import check_can_be_cut

        check_can_be_cut(self.plain, "DeepSpeed", allows_sparse=self.stage == 0)  # the others it cannot even send
        if self.stage:
            engine.check(self.plain, self.optimizer, allows_any=bool(self._own.get("zero_allow_untested_optimizer")))

    def _make_precision(self) -> EnginePrecision:
        from distributed.backends._deepspeed.precision import EnginePrecision

        self._engine_precision = EnginePrecision(self.mixed_precision, self.device, self.config)
        return self._engine_precision

    def _before_first_update(self, group: Group) -> None:
        from distributed.backends._deepspeed import loading
        from distributed.backends._deepspeed.cpu_adam import HostAdam
        from distributed.backends._deepspeed.engine import Engine
        from distributed.backends._deepspeed.unused import FirstGradients

        with self._forked():
            scale = self._engine_precision.loss_scale
            self.engine = Engine(
                self.plain, self.optimizer, self._engine_config(), self.world, scale, previous=self.engine
            )
        loading.limit_waits(self.config.timeout_s)
        self._engine_precision.engage(self.plain)
        self._wrapped = self.engine.wrapper
        self._wrapped.train()
        names = {parameter: name for name, parameter in self.plain.named_parameters()}
        self._first_gradients = FirstGradients(names, self.engine.groups)
        if self.stage == 0:
            self._update = self.engine.wrapper.step
        if self.options.cpu_adam:
            self._host_adam = HostAdam(self._operator, self.optimizer)

    def _engine_config(self) -> dict[str, Any]:
        """DeepSpeed's config, complete: what is ours over what the user's own says."""
        pinned = self.device.type == "cuda"
        zero: dict[str, Any] = {"stage": self.stage}
        for kind in ("optimizer", "param"):
            if self.options.offloads(kind):
                zero[f"offload_{kind}"] = {"device": "cpu"}
        ours: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self._batch.batch_size,
            "gradient_accumulation_steps": self._batch.gradient_accumulation_steps,
            "zero_optimization": zero,
            "gradient_clipping": (self.config.gradient_clipping or 0.0) if self.stage else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 60,  # the display is ours
        }
        if self.mixed_precision != "no":
            ours[self.mixed_precision] = {"enabled": True}
        own = {name: value for name, value in self._own.items() if name not in ("optimizer", "train_batch_size")}
        config = config_file.merged(own, ours)
        # A bucket no larger than the model: DeepSpeed's of two gigabytes is taken at once.
        size = min(5 * 10**8, sum(p.numel() for p in self.plain.parameters()))
        zero = config["zero_optimization"]
        zero.setdefault("reduce_bucket_size", size)
        for kind in ("offload_optimizer", "offload_param"):
            if kind in zero:
                zero[kind].setdefault("pin_memory", pinned)
        return config

    # ------------------------------------------------------------------ the step

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        assert self.engine is not None
        return self.engine.accumulating()

    def _backward(self, value: torch.Tensor) -> None:
        assert self.engine is not None
        self.engine.wrapper.backward(value, scale_wrt_gas=False)

    def _finish_update(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        """Clipping, the look for NaN and the loss scale are the engine's, in one pass over the partitions."""
        if self._first_gradients is not None:
            self._first_gradients.check(self.world.reduce)
            self._first_gradients = None
        if self.stage == 0:
            super()._finish_update(group, losses, result)
            return
        assert self.engine is not None
        divide_by = 1.0
        if self._total is not None:
            self._counting.wait()
            divide_by, self._total = self._total.item() / group.num_samples, None
        with self._warming_up():
            is_made = self.engine.step(divide_by)
        if not is_made:
            self._on_non_finite(group, losses, result)
        if not result.skipped and self.schedule.follows_updates:
            self.schedule.step()
        self._step += 1

    # ------------------------------------------------------------------ state, end

    def save(self, directory: Path) -> dict[str, Any]:
        if self.engine is None:
            return super().save(directory)
        own = self.optimizer
        with self.engine.whole_weights(), self._engine_precision.whole_buffers():
            self.optimizer = self.engine.whole_optimizer()
            try:
                extra = super().save(directory)
            finally:
                self.optimizer = own
        if self.options.native_checkpoint and not self.engine.is_released:
            with self._engine_precision.whole_buffers():
                self.engine.save_own_files(directory / "deepspeed", self._step)
        return extra

    def export(self, path: Path) -> None:
        whole = contextlib.nullcontext() if self.engine is None else self.engine.whole_weights()
        with whole, self._engine_precision.whole_buffers():
            super().export(path)

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        whole = contextlib.nullcontext() if self.engine is None else self.engine.whole_weights()
        with whole, self._engine_precision.whole_buffers(), super().whole_model() as model:
            yield model

    def reassemble(self) -> None:
        if self.engine is not None:
            self.engine.release(self.device)

    def unwrap(self) -> None:
        if self._host_adam is not None:
            self._host_adam.release()
            self._host_adam = None
        if self._first_gradients is not None:
            self._first_gradients.release()
            self._first_gradients = None
        if self.engine is not None:
            self.engine.abandon()
            self._engine_precision.release()
        super().unwrap()


class DeepSpeedObserver(TorchObserver):
    """Observe DeepSpeed's engine."""

    _backend: DeepSpeedBackend

    @property
    def cuts_weights(self) -> bool:
        return self._backend.stage == 3

    def gradient_norm(self) -> float | None:
        own = self._backend
        if own.stage == 0 or own.engine is None or own.engine.is_released:
            return super().gradient_norm()
        return own.engine.gradient_norm()

    def local_values(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights. Stage 3 gathers them, a collective; the main process then holds them all."""
        own = self._backend
        if own.stage != 3 or own.engine is None:
            yield from super().local_values()
            return
        with own.engine.whole_weights():
            if own.context.is_main_process:
                yield from ((name, values.copy()) for name, values in super().local_values())

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._deepspeed.profiler import DeepSpeedProfiler

        own = self._backend
        return DeepSpeedProfiler(directory, own.context.rank, own.device, warmup, active, own.plain)
