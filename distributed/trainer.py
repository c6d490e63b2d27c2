"""Trainer, which users call: one model, one configuration, any backend. What it does inside the processes belongs to `training`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends.base import Backend
from distributed.callbacks import Callback
from distributed.config.merging import MergedConfig
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, nearest
from distributed.loggers import registry as loggers
from distributed.metrics.monitor import check_names
from distributed.metrics.over_all import as_declared, check_metric
from distributed.runs.history import History
from distributed.runs.processes import interrupts_kept
from distributed.state import Job
from distributed.training.fits import Fits
from distributed.training.setup import Setup
from distributed.training.trial import current

if TYPE_CHECKING:
    from distributed.finders.curve import LearningRateCurve


class Trainer:
    """Trains `model` on the backend that the settings choose.

    Args:
        model: a module, or a factory `() -> module` (called on every rank under the seed).
        config: a DistributedConfig; the path of a YAML file, also one that a run wrote, whose settings are weaker than
            those beside it; or a plain dict from a sweep (settings and `lr` apply, the rest is recorded).
        optimizer: an optimizer, or a factory `(params) -> optimizer`; none means AdamW at `learning_rate`.
        scheduler: a schedule, or a factory `(optimizer) -> schedule`; stepped once per update, or per epoch with
            `scheduler_interval="epoch"`.
        loss_fn: `(outputs, targets)` -> a scalar (mean over the samples), any other tensor (meaned over its elements), or
            `(sum, count)`. None: cross-entropy for [batch, classes] outputs with class indices, mean squared error for
            float targets of the outputs' shape, or the model's own `.loss`.
        training_step: `(model, batch)` -> the forms of a loss, a dict with `loss` and metrics, or an object with `.loss`.
        metrics: name -> `(outputs, targets)` with the forms of a loss, a mean over the samples; or `over_all(function)`, or an
            object with `update`, `compute` and `reset` (torchmetrics, Keras), which are computed over all samples at once. For
            the latter a `training_step` returns their arguments by name. Class-index targets get `accuracy` by themselves.
        callbacks: `Callback` objects; their hooks run on every rank.
        settings: fields of DistributedConfig, or a backend's group: `ddp={"bucket_cap_mb": 50}`.

    Raises ConfigError or ResourceError, in the parent and in every worker, before any of them joins the others.
    """

    _backend: str | None = None  # of the class: the backend that it pins

    def __init__(
        self,
        model: Any,
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        training_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        if not callable(model):
            raise ConfigError(f"model is a {type(model).__name__}: pass a module, or a function that makes one")
        if loss_fn is not None and training_step is not None:
            raise ConfigError("loss_fn and training_step both say what the loss is: drop one of them")
        _check_objects(optimizer, scheduler, loss_fn, training_step, metrics)
        _check_callbacks(callbacks)
        declared = {name: as_declared(metric) for name, metric in (metrics or {}).items()}
        job = Job(model, optimizer, scheduler, loss_fn, training_step, declared)
        self.setup = Setup(type(self).__name__, self._backend, job, list(callbacks), config, settings)
        self._fits = Fits(self.setup, type(self))
        self.history: History | None = None

    def __repr__(self) -> str:
        model, plan = self.job.model, self.plan
        name = getattr(model, "__name__", type(model).__name__)
        processes = f"{plan.world_size} process{'es' * (plan.world_size > 1)} on {plan.device}"
        trained = "not trained" if self.history is None else f"trained to step {self.history.steps}"
        return f"{type(self).__name__}({name}, backend={plan.backend!r}, {processes}, {trained})"

    # ------------------------------------------------------------------ what users call

    @interrupts_kept()
    def fit(
        self,
        train_data: Any,
        val_data: Any = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        mlflow_experiment: str | None = None,
    ) -> History:
        """Train, validating after each epoch. All ranks call it; outside a worker it starts the workers itself.

        Args:
            train_data, val_data: a DataLoader, a map-style or an iterable dataset; inputs and targets together, as
                TensorDataset(inputs, targets). On TensorFlow also a tf.data.Dataset, or arrays in a tuple.
            epochs, max_steps, checkpoint_dir, mlflow_experiment: as the settings of that name. A further `fit` of the same
                trainer goes on from its state, for that many epochs or steps more.

        Returns the History; the model in this process then has the trained weights. Where workers were started, the optimizer,
        the schedule and what callbacks keep outside of `state_dict` stay as they were here: the copies of the workers changed.
        Raises TrainingError when training failed, TrainingInterrupted (an exit with 128 + signal) after SIGTERM, and
        KeyboardInterrupt after Ctrl-C, both when the state has been saved.
        """
        given = {
            "epochs": epochs,
            "max_steps": max_steps,
            "checkpoint_dir": checkpoint_dir,
            "mlflow_experiment": mlflow_experiment,
        }
        merged = self.setup.merge({name: value for name, value in given.items() if value is not None})
        loggers.check(merged)
        if (trial := current()) is not None:
            trial.on_fit(self)
        if train_data is None:
            raise ConfigError("fit() got no training data: pass a DataLoader or a dataset")
        self.history = self._fits.fit(merged, train_data, val_data)
        return self.history

    def find_learning_rate(
        self, train_data: Any, *, min_rate: float = 1e-7, max_rate: float = 1.0, num_steps: int = 100
    ) -> LearningRateCurve:
        """Train a copy while its rate rises exponentially from `min_rate` to `max_rate`; the trainer stays as it is.

        All ranks call it, before the first `fit`; outside a worker it starts the workers itself, as `fit` does. A short fit of
        `num_steps` updates, ended early where the loss diverges, without validation, schedule and callbacks. Its files lie in
        `learning-rate` below the run directory; a run that goes on takes the curve from there.

        Returns the curve, the same on all ranks; its `suggestion` is a value for the setting `learning_rate`.
        Raises ConfigError for a wrong range, and for a trainer that has trained; else as `fit`.
        """
        from distributed.finders.learning_rate import Request, find_learning_rate

        return find_learning_rate(self._fits, train_data, Request(min_rate, max_rate, num_steps))

    @interrupts_kept()
    def find_batch_size(self, train_data: Any, *, start: int = 8, max_size: int | None = None) -> int:
        """The largest of `start`, twice that, and so on up to `max_size`, with which updates fit into the memory of every rank.

        Each size is tried by a few updates in workers that are started for it, so it is called in a plain script, before the
        first `fit`; the trainer stays as it is. On CPUs `max_size` must be given: memory is the whole machine's there.

        Returns a value for the setting `batch_size`: samples of one micro-batch of one device.
        Raises ResourceError where `start` does not fit, ConfigError where it cannot be tried; else as `fit`.
        """
        from distributed.finders.batch_size import find_batch_size

        return find_batch_size(self._fits, train_data, start=start, max_size=max_size)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Loss and metrics over `data`, each sample once. All ranks call it; outside a worker it runs in this process."""
        measured: dict[str, float] = self._fits.open_session().evaluate(data)
        return measured

    def predict(self, data: Any) -> Any:
        """The model's outputs for every sample of `data` in order, on the host. All ranks call it and get all of them.

        `data` is what `fit` takes, or one tensor or array of inputs, a sample in each row.
        The order is that of the data set, also where a DataLoader shuffles; a sampler of your own keeps the order that it has.
        A batch is taken as in training; of a tuple the last entry (the targets) is left out. Tensors and arrays are joined
        along their first dimension, lists with an entry per sample one after the other, also inside dicts, tuples and data
        classes. Tensors of different shapes come as a list, one entry per sample; what belongs to no sample (a loss) as a
        list, one entry per batch. Data that is `data.presharded` comes rank by rank.
        """
        return self._fits.open_session().predict(data)

    def metric_average(self, value: Any, name: str = "metric") -> float:
        """The mean over all ranks of a number that each of them has; `name` is for messages. All ranks call it.

        Raises ConfigError where `value` is no number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"metric_average({value!r}, name={name!r}) takes one number per rank: pass {name}.item()"
            ) from None
        average: float = self._fits.open_session().metric_average(number, name)
        return average

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trained state. All ranks call it.

        A path ending in `.safetensors` gets the model's weights by name in one file; any other is a directory that gets a
        checkpoint, which `resume_from_checkpoint` takes. Returns what was written.
        """
        if self._fits.remote is not None and Path(path).suffix != ".safetensors":
            return self._fits.remote.copy_checkpoint(Path(path))
        saved: Path = self._fits.open_session().save(Path(path))
        return saved

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        """The model with all of its weights on the main process, for the time of a `with` block: to save it or look at it.

        All ranks enter and leave the block; the main process gets the module and the others None. Also inside `fit`, from a
        callback. A model that lies in pieces is gathered into host memory, and what is changed in it then is lost.
        """
        with self._fits.open_session().whole_model() as model:
            yield model

    @property
    def model(self) -> Any:
        """The user's module; after `fit` with the trained weights.

        It is whole on every rank then. On `fsdp` that holds where every process has room for it, and a notice says where not;
        during `fit` `fsdp` and ZeRO-3 keep it in pieces. `whole_model()` gathers it.
        """
        return self.job.model if self.backend.model is None else self.backend.model

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, or the process that called `fit`."""
        return self.setup.is_main_process

    @property
    def job(self) -> Job:
        """What is trained: the arguments of the constructor."""
        return self.setup.job

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks; one may be added before `fit`."""
        return self.setup.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self.setup.callbacks = callbacks

    @property
    def merged(self) -> MergedConfig:
        """The settings of the newest fit, each with its source."""
        return self.setup.merged

    @property
    def plan(self) -> ProcessPlan:
        """The processes and devices of a fit."""
        return self.setup.plan

    @property
    def backend(self) -> Backend[Any]:
        """The adapter of the backend."""
        return self.setup.backend

    @property
    def best_accuracy(self) -> float:
        """`History.best_accuracy` of the last fit."""
        if self.history is None:
            raise ConfigError("best_accuracy is known after fit(): call it first")
        return self.history.best_accuracy


def _check_objects(optimizer: Any, scheduler: Any, loss_fn: Any, training_step: Any, metrics: Any) -> None:
    """Refuse what can be none of the forms that the constructor takes."""
    examples = {
        "optimizer": (optimizer, "torch.optim.Adam(model.parameters()), or lambda params: torch.optim.Adam(params)"),
        "scheduler": (scheduler, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"),
    }
    for name, (value, example) in examples.items():
        if isinstance(value, (str, bytes, Mapping, list, tuple)):
            raise ConfigError(
                f"{name}={value!r} is a {type(value).__name__}: pass an object or a factory, {name}={example}"
            )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is a {type(metrics).__name__}: pass names and functions, metrics={{'top1': top1}}")
    check_names(metrics or ())
    for name, value in (metrics or {}).items():
        check_metric(name, value)
    for name, value in {"loss_fn": loss_fn, "training_step": training_step}.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}: pass a function")


def _check_callbacks(callbacks: Any) -> None:
    """Refuse what is no callback, and one with a method that looks like a hook and is none."""
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}: pass a list, callbacks=[...]")
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callback {callback!r} is not a distributed.Callback: derive its class from it")
        for name in dir(callback):
            if name.startswith("on_") and name not in hooks and callable(getattr(callback, name)):
                raise ConfigError(
                    f"{type(callback).__name__}.{name} would never be called{nearest(name, hooks)}: the hooks are"
                    f" {', '.join(hooks)}; give a method of your own a name without on_"
                )


class PyTorchDDPTrainer(Trainer):
    """Trainer on PyTorch DistributedDataParallel; its options may be given flat (`static_graph=True`)."""

    _backend = "pytorch-ddp"


class FSDPTrainer(Trainer):
    """Trainer on PyTorch FSDP2; its options may be given flat (`cpu_offload=True`)."""

    _backend = "fsdp"


class RayTrainer(Trainer):
    """Trainer whose processes Ray Train starts; its options may be given flat (`engine="fsdp"`)."""

    _backend = "ray"


class DeepSpeedTrainer(Trainer):
    """Trainer on DeepSpeed ZeRO; its options may be given flat (`zero_stage=3`)."""

    _backend = "deepspeed"


class HorovodTrainer(Trainer):
    """Trainer on Horovod; its options may be given flat (`compression=hvd.Compression.fp16`)."""

    _backend = "horovod"


class TensorFlowDistributedTrainer(Trainer):
    """Trainer for Keras models on TensorFlow; its options may be given flat."""

    _backend = "tensorflow"
