"""Train with DeepSpeed: the torch step with ZeRO stages 0 to 3, and optionally optimizer and parameters in host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._deepspeed import config_file
from distributed.backends._deepspeed.wrapper import DeepSpeedObserver, DeepSpeedWrapper
from distributed.backends.base import If, Refusals
from distributed.backends.effects import SEVERAL_PROCESSES, Need
from distributed.backends.torch_base import OF_WHOLE_MATRICES, PROCESS_GROUPS, TorchBackend
from distributed.callbacks import AVERAGED_WEIGHTS, GRADIENTS
from distributed.config.fields import setting
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.state import Job, WorkerContext

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig

_DEFAULT_STAGE = 2
_AT_STAGE_0 = If(
    "with zero_stage=0", lambda own: own.options.stage == 0, "set zero_stage=1, 2 or 3, or use backend 'pytorch-ddp'"
)
_WAITS = Need(
    "several processes, or deepspeed.cpu_adam",  # also limits the wait for a process that compiles cpu_adam
    lambda where, name: "" if where.backend.options.cpu_adam else SEVERAL_PROCESSES.lacks(where, name),
)
# For fp16 on CPUs, DeepSpeed 0.19 needs oneDNN with AVX512-FP16 or AMX. That is too rare to be detected here.
HAS_FP16_ON_CPU = False


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptions:
    """Settings of DeepSpeed, and a DeepSpeed config beside them."""

    zero_stage: int | None = setting(
        None,
        "what is sharded across the processes: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (default: 2)",
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
        "also write DeepSpeed's own files, which are pickles, into each checkpoint, for its tools (zero_stage 1 to 3)",
    )
    deepspeed_config: dict[str, Any] | None = setting(
        None,
        "a DeepSpeed config: a dict, the path of a JSON file or a DeepSpeedConfig; 'auto' takes the Trainer's values",
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
                "deepspeed.native_checkpoint=True needs zero_stage=1, 2 or 3, not 0, whose files DeepSpeed's tools cannot open:"
                " set one, or drop it (model/*.safetensors holds the whole weights)"
            )
        if self.cpu_adam and not self.offloads("optimizer"):
            raise ConfigError(
                "deepspeed.cpu_adam=True updates an offloaded optimizer: set offload_optimizer=True, or drop it"
            )

    @staticmethod
    def _in_both(own: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield (option, where, value in the DeepSpeed config) for each option that the DeepSpeed config `own` sets
        too."""
        if (stage := config_file.at(own, ("zero_optimization", "stage"))) is not None:
            yield "zero_stage", f"deepspeed_config.zero_optimization.stage={stage}", stage
        for kind in ("optimizer", "param"):
            section = f"offload_{kind}"
            if (device := config_file.at(own, ("zero_optimization", section, "device"))) is not None:
                yield section, f"deepspeed_config.zero_optimization.{section}.device={device!r}", device == "cpu"

    @property
    def stage(self) -> int:
        """The ZeRO stage in effect. A DeepSpeed config without a stage means 0, as in DeepSpeed."""
        own = self.deepspeed_config
        if self.zero_stage is not None or own is None:
            return _DEFAULT_STAGE if self.zero_stage is None else self.zero_stage
        return int(config_file.at(own, ("zero_optimization", "stage")) or 0)

    def offloads(self, kind: str) -> bool:
        """Return whether the optimizer (`kind="optimizer"`) or the parameters (`kind="param"`) are in host memory."""
        device = config_file.at(self.deepspeed_config or {}, ("zero_optimization", f"offload_{kind}", "device"))
        return bool(getattr(self, f"offload_{kind}")) or device == "cpu"

    def implied(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (location, setting, value) for each of our settings that the DeepSpeed config determines."""
        return config_file.implied(self.deepspeed_config or {})

    def settings_of_arguments(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of TrainingArguments without those that the optimizer of the DeepSpeed config replaces.

        As in transformers, entries "auto" of that optimizer get the values of the arguments.
        """
        own = self.deepspeed_config
        if own is None or "optimizer" not in own:
            return dict(settings)
        kept = {name: value for name, value in settings.items() if name not in config_file.OF_OPTIMIZER}
        filled = config_file.with_optimizer_of(own, settings)
        return {**kept, "deepspeed.deepspeed_config": filled}


_PARTITIONED = If(
    "with zero_stage above 0",
    lambda own: own.options.stage > 0,
    "ZeRO keeps weights and gradients in buffers of its own: set zero_stage=0, or use backend 'fsdp'",
)


def _with_own_files(why: str) -> If:
    return If("with native_checkpoint", lambda own: own.options.native_checkpoint, f"{why}: drop one of them")


class DeepSpeedBackend(TorchBackend[DeepSpeedOptions]):
    """Run the torch step through DeepSpeed's engine.

    The model and its optimizer are unwrapped until the first update of a fit. The model is unwrapped again after the fit.
    Checkpoints have the same format as those of the other torch backends.
    """

    Options: ClassVar[type[Any]] = DeepSpeedOptions
    observer: DeepSpeedObserver
    wrapper: DeepSpeedWrapper
    refuses_keras: ClassVar[str] = "its engine replaces the parameters under Keras's variables; use pytorch-ddp"
    refuses_callbacks: ClassVar[Refusals] = dict.fromkeys((GRADIENTS, AVERAGED_WEIGHTS), (_PARTITIONED,))
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {"start_timeout": (_WAITS,)}
    refuses: ClassVar[Refusals] = {
        **PROCESS_GROUPS,
        "dtype=float64": "its engine has no float64, and ZeRO keeps parameters in float32: use backend 'fsdp'",
        "mixed_precision=fp16": (
            If("on CPUs", lambda own: own.plan.device == "cpu" and not HAS_FP16_ON_CPU, "set mixed_precision='bf16'"),
            _AT_STAGE_0,
        ),
        "mixed_precision=bf16": (_AT_STAGE_0,),
        **{
            name: (If("with zero_stage above 0", lambda own: own.options.stage > 0, str(why)),)
            for name, why in OF_WHOLE_MATRICES.items()
        },
        "checkpoint_trainable_only": (_with_own_files("DeepSpeed's own files have the whole model"),),
        **dict.fromkeys(
            ("checkpoint_async", "snapshot_every_n_steps"),
            (_with_own_files("DeepSpeed writes its own files to the disk while training waits"),),
        ),
        "compile": "its hooks would break the compiled graph at every module: use backend 'pytorch-ddp' or 'fsdp'",
    }

    def __init__(self, merged: MergedConfig, options: DeepSpeedOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.stage = options.stage
        self.own_config = options.deepspeed_config or {}
        kind = self.mixed_precision
        if config_file.at(self.own_config, (kind, "enabled")) is False:
            raise ConfigError(
                f"mixed_precision={kind!r} contradicts deepspeed_config.{kind}.enabled=False: drop one of them"
            )
        self.observer = DeepSpeedObserver(self)
        self.wrapper = DeepSpeedWrapper(self)

    def setup(self) -> WorkerContext:
        from distributed.backends._deepspeed import cpu_adam, loading
        from distributed.backends._deepspeed.copying import DeepSpeedCopying

        loading.load(self.plan.device)
        context = super().setup()
        self.copying = DeepSpeedCopying(self)
        if self.options.cpu_adam:
            self.operator = cpu_adam.load(
                self.config.start_timeout, lambda text: self.on_event({"kind": "notice", "text": text})
            )
        return context

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        from distributed.backends._deepspeed import engine
        from distributed.backends._torch.modules import check_can_be_cut

        self.wrapper.begin(batch)
        notices = super().prepare(_with_own_optimizer(job, self.own_config, self.config), batch)
        # DeepSpeed 0.19 can send sparse gradients only at stage 0.
        check_can_be_cut(self.plain, "DeepSpeed", allows_sparse=self.stage == 0)
        if self.stage:
            allows_any = bool(self.own_config.get("zero_allow_untested_optimizer"))
            engine.check(self.plain, self.optimizer, self.stage, allows_any=allows_any)
        if self.device.type == "cpu" and (self.options.offloads("optimizer") or self.options.offloads("param")):
            notices.append("offloading frees no memory here: on CPUs all memory is host memory")
        return notices

    def save(self, directory: Path) -> dict[str, Any]:
        engine = self.wrapper.engine
        if engine is None:
            self.wrapper.settle()
            return super().save(directory)
        own = self.optimizer
        with self.wrapper.whole_buffers(), engine.in_pieces() as self.optimizer:
            try:
                extra = super().save(directory)
            finally:
                self.optimizer = own
        if self.options.native_checkpoint and not engine.is_released:
            with self.wrapper.whole_buffers():
                engine.save_own_files(directory / "deepspeed", self.update.step)
        return extra

    def export(self, path: Path) -> None:
        with self.wrapper.whole():
            super().export(path)

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        with self.wrapper.whole(), super().whole_model() as model:
            yield model

    def reassemble(self) -> None:
        if self.wrapper.engine is not None:
            self.wrapper.engine.release(self.device)


def _with_own_optimizer(job: Job, own_config: Mapping[str, Any], config: DistributedConfig) -> Job:
    """Return `job` with the optimizer that the DeepSpeed config asks for."""
    import torch

    found = config_file.adam(own_config, config.learning_rate)
    if found is None:
        return job
    if job.optimizer is not None:
        raise ConfigError("optimizer and deepspeed_config.optimizer both set the optimizer: drop one")
    kind, arguments = found
    return dataclasses.replace(job, optimizer=functools.partial(getattr(torch.optim, kind), **arguments))
