"""Trainer, the class that users call, with one model or several on any backend; what it does inside the processes belongs in `training`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends.base import Backend
from distributed.callbacks import Callback
from distributed.config.addresses import refuse_address
from distributed.config.merging import MergedConfig
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.loggers import logged
from distributed.loggers.logger import Logger, split_loggers
from distributed.metrics.named import read_metrics
from distributed.runs.history import History
from distributed.runs.processes import interrupts_kept
from distributed.state import Job
from distributed.training import fit_arguments
from distributed.training.fits import Fits
from distributed.training.processing import metrics_of_texts, processing_arguments
from distributed.training.setup import make_setup
from distributed.training.several import several_job
from distributed.training.trainer_arguments import check_objects, check_one_model, read_callbacks, refuse_lightning
from distributed.training.trial import current

if TYPE_CHECKING:
    from distributed.finders.curve import LearningRateCurve


class Trainer:
    """Train `model` on the backend that the settings choose.

    Args:
        model: a module, or a factory `() -> module` (called on every rank with the seed of the run).
        config: a DistributedConfig, the path of a YAML file (such as a run's config.yaml), or a plain dict from a
            sweep. In a plain dict, settings and `lr` apply, and other entries are only recorded. `settings` override all of them.
        optimizer: the name of an optimizer ("adamw", "adam", "sgd", "adafactor", "muon"), an optimizer, or a factory
            `(params) -> optimizer`. None means AdamW at `learning_rate`.
        scheduler: the name of a schedule ("constant", "linear", "cosine", "polynomial", "wsd"), a schedule, or a factory
            `(optimizer) -> schedule`. Stepped once per update, or per epoch with `scheduler_interval="epoch"`.
        loss_fn: `(outputs, targets)` -> a scalar (the mean over the samples), any other tensor (averaged over its
            elements), or `(sum, count)`. A name is accepted too. For a Keras model it is a name in `keras.losses`, such as
            "sparse_categorical_crossentropy". For a torch module it is "cross_entropy", "mse", "l1" or "bce_with_logits". None
            means cross-entropy for `[batch, classes]` outputs with class indices, mean squared error for float targets of
            the outputs' shape, or the model's own `.loss`.
        training_step: `(model, batch)` -> what `loss_fn` may return, a dict with `loss` and metrics, or an object with
            `.loss`.
        metrics: metrics by name, or a list of names and objects, `["accuracy", "mae"]`. The names are those of
            `keras.metrics` for a Keras model, and "accuracy" and the names of losses for a torch module. A function
            `(outputs, targets)` returns what `loss_fn` may return and is averaged over the samples. `over_all(function)` and
            objects with `update`, `compute` and `reset` (torchmetrics, Keras) are computed over all samples at once; a
            `training_step` must return their arguments by name. `accuracy` is added if the targets are class indices.
        callbacks: `Callback` objects, or those of `keras.callbacks`. Their hooks run on every rank.
        loggers: names of loggers ("tensorboard", "mlflow", "wandb", "csv", or one that an installed package registers) and `Logger`
            objects, which get what the main process logs. Names may also be given by the setting `loggers`.
        models: several modules or factories by name, instead of `model`. They need a
            `training_step(models, batch, update)`, which calls `update(NAME, loss)` for each model that it trains.
        optimizers: the optimizers of `models` by name. A model without an entry is not trained. None means that all are
            trained with the default.
        schedulers: the schedules of these optimizers by name.
        tokenizer: a tokenizer of transformers. It pads rows that hold its inputs, unless there is a `collate_fn`, and is
            saved beside an exported model. Callbacks get it as `context.processing_class`.
        processing_class: another name of `tokenizer`, as in transformers. It may also be a processor of images or audio, which
            pads nothing.
        collate_fn: a function that makes a batch from a list of samples, such as a data collator of transformers. It cannot be
            combined with a DataLoader that has its own `collate_fn`.
        predict_with_generate: whether metrics get what `model.generate()` returns for the inputs of each validation batch. A
            metric is then a function `(ids, labels)`, which the main process calls with all samples. Both arguments have the
            shape `[samples, length]`. The ids do not contain the prompt, and the labels are padded with -100. Such a metric is
            not computed in training.
        generation_config: a GenerationConfig of transformers, or a dict whose entries replace those of the model's.
        settings: fields of DistributedConfig, or the options of a backend: `ddp={"bucket_cap_mb": 50}`.

    Raises:
        ConfigError: an argument or a setting is wrong.
        ResourceError: a library or a device is missing. Both are raised in the parent and in every worker, before the
            workers join each other.
    """

    _backend: str | None = None  # the backend that a subclass pins

    def __init__(
        self,
        model: Any = None,
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        loss_fn: Callable[..., Any] | str | None = None,
        training_step: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any] | str] | Sequence[Any] | None = None,
        callbacks: Sequence[Any] = (),
        loggers: str | Sequence[str | Logger] = (),
        models: Mapping[str, Any] | None = None,
        optimizers: Mapping[str, Any] | None = None,
        schedulers: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        processing_class: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        predict_with_generate: bool = False,
        generation_config: Any = None,
        **settings: Any,
    ) -> None:
        objects, names = split_loggers(loggers)
        if names:
            settings = {**settings, "loggers": names}
        if isinstance(optimizer, str):
            settings, optimizer = {**settings, "optimizer": optimizer}, None
        if isinstance(scheduler, str):
            settings, scheduler = {**settings, "scheduler": scheduler}, None
        if loss_fn is not None and training_step is not None:
            raise ConfigError("loss_fn and training_step both define the loss: drop one of them")
        check_objects(optimizer, scheduler, loss_fn, training_step, 2 if models is None else 3)
        given = read_callbacks(callbacks)
        declared = read_metrics(metrics, has_training_step=training_step is not None)
        if predict_with_generate:
            declared = metrics_of_texts(declared)
        processing = processing_arguments(
            tokenizer, processing_class, collate_fn, predict_with_generate, generation_config
        )
        if models is not None:
            of_one = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loss_fn": loss_fn}
            job = several_job(models, optimizers, schedulers, training_step, declared, of_one_model=of_one)
        else:
            check_one_model(model, optimizers, schedulers)
            refuse_lightning(model, loss_fn, training_step)
            job = Job(model, optimizer, scheduler, loss_fn, training_step, declared)
        job = dataclasses.replace(job, **processing)
        self.setup = make_setup(type(self).__name__, self._backend, job, given, config, settings, objects)
        self._fits = Fits(self.setup, type(self))

    def __repr__(self) -> str:
        model, plan = self.job.model, self.plan
        name = ", ".join(self.job.names) or getattr(model, "__name__", type(model).__name__)
        processes = f"{plan.world_size} process{'es' * (plan.world_size > 1)} on {plan.device}"
        trained = "not trained" if self.history is None else f"trained to step {self.history.steps}"
        return f"{type(self).__name__}({name}, backend={plan.backend!r}, {processes}, {trained})"

    # ------------------------------------------------------------------ public methods

    @interrupts_kept()
    def fit(
        self,
        train_data: Any = None,
        val_data: Any = None,
        *,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Any] = (),
        epochs: int | None = None,
        max_steps: int | None = None,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        verbose: bool | int | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        mlflow_experiment: str | None = None,
        **others: Any,
    ) -> History:
        """Train the model, with validation after each epoch or when the settings say so. Every rank must call it.

        Outside a worker it starts the workers itself. A further `fit` of the same trainer continues from its state.

        Args:
            train_data: a DataLoader, a map-style dataset or an iterable dataset that yields inputs with targets, such
                as `TensorDataset(inputs, targets)`. On TensorFlow also a tf.data.Dataset, or a tuple of arrays.
            val_data: validation data of the same kinds, or None. For several validation sets, pass a dict of such data sets by
                name. Their metrics are called `val_NAME_loss` and so on.
            x: the inputs, instead of `train_data`: an array or tensor (NumPy, torch, TensorFlow, pandas) with one sample per
                row. Several inputs are a tuple of arrays, or a dict by name. Floats are converted to the `dtype` of the run.
            y: the targets of `x`, with one row per sample. Several targets of a Keras model are a tuple or a dict.
            sample_weight: the weight of each sample of `x` in the loss of a Keras model, of shape `[samples]`. The weighted
                losses are summed and divided by the number of samples.
            class_weight: the weights of the samples by class index, instead of `sample_weight`. Other classes have weight 1.
            validation_data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays, or a data set, instead of `val_data`.
            callbacks: further callbacks for this fit.
            epochs: the setting of that name. In a further `fit`, the number of further epochs.
            max_steps: the setting of that name. In a further `fit`, the number of further updates.
            batch_size: the setting of that name: samples per process and micro-batch. `global_batch_size` of the Trainer is the
                number of samples per update, which does not depend on the number of processes.
            shuffle: the setting of that name.
            verbose: the setting of that name. Keras's 1, 2 and "auto" mean True, and 0 means False.
            checkpoint_dir: the setting of that name.
            mlflow_experiment: the setting of that name.
            others: any other argument. It is refused, and the error names the argument or the setting to use instead.

        Returns:
            The History. The model in this process has the trained weights. If workers were started, the optimizer, the
            schedule and attributes of callbacks outside of `state_dict` are unchanged here, because the workers trained
            copies.

        Raises:
            ConfigError: an argument or a setting is wrong.
            ResourceError: a device or a port is missing, another run uses the run directory, or some ranks did not join.
            TrainingError: training failed.
            TrainingInterrupted: SIGTERM arrived, and the state has been saved. If uncaught, the exit code is 128 + signal.
            KeyboardInterrupt: Ctrl-C was pressed, and the state has been saved.
        """
        given = {
            "epochs": epochs,
            "max_steps": max_steps,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "verbose": verbose,
            "checkpoint_dir": checkpoint_dir,
            "mlflow_experiment": mlflow_experiment,
        }
        if (trial := current()) is not None:
            trial.on_fit(self, self._fits)
        fit_arguments.refuse_positional(train_data, val_data)
        settings = fit_arguments.settings_of(given, others)
        train = fit_arguments.training_set(train_data, x, y, sample_weight, class_weight)
        val = fit_arguments.validation_set(val_data, validation_data)
        with self._with_callbacks(read_callbacks(callbacks)):
            return self._fits.fit(settings, train, val)

    @contextlib.contextmanager
    def _with_callbacks(self, callbacks: list[Callback]) -> Iterator[None]:
        """Add `callbacks` inside the block, and read those that were added to `self.callbacks` since the last fit."""
        before = read_callbacks(self.setup.callbacks)
        self.setup.callbacks[:] = [*before, *callbacks]
        try:
            yield
        finally:
            self.setup.callbacks[:] = before

    def find_learning_rate(
        self, train_data: Any, *, min_rate: float = 1e-7, max_rate: float = 1.0, num_steps: int = 100
    ) -> LearningRateCurve:
        """Train a copy of the model while the learning rate rises exponentially from `min_rate` to `max_rate`.

        Every rank must call it, before the first `fit`. Outside a worker it starts the workers itself, as `fit` does. The
        copy is trained for `num_steps` updates, or fewer if the loss diverges, without validation, schedule or callbacks.
        This trainer does not change. The files are in `learning-rate` below the run directory, and a resumed run reads the
        curve from there.

        Args:
            train_data: training data, as for `fit`.
            min_rate: the learning rate of the first update.
            max_rate: the learning rate of the last update.
            num_steps: the number of updates.

        Returns:
            The curve, the same on all ranks. Its `suggestion` is a value for the setting `learning_rate`.

        Raises:
            ConfigError: the range is wrong, or the trainer has been used. The errors of `fit` can be raised too.
        """
        from distributed.finders.learning_rate import RateRange, find_learning_rate

        self._refuse_several("find_learning_rate() finds the rate of one optimizer: set those of several by hand")

        return find_learning_rate(self._fits, train_data, RateRange(min_rate, max_rate, num_steps))

    @interrupts_kept()
    def find_batch_size(self, train_data: Any, *, start: int = 8, max_size: int | None = None) -> int:
        """Return the largest of the sizes `start`, 2 x `start`, 4 x `start`, ... that fits into the memory of every rank.

        Each size is tried with a few updates in workers that are started for it. Call it in a plain script, before the
        first `fit`. This trainer does not change.

        Args:
            train_data: training data, as for `fit`.
            start: the first size to try, in samples.
            max_size: the largest size to try, in samples. Required on CPUs, where the limit would be the memory of the
                whole machine.

        Returns:
            A value for the setting `batch_size`: samples per device and micro-batch.

        Raises:
            ResourceError: `start` does not fit.
            ConfigError: `start` cannot be tried. The errors of `fit` can be raised too.
        """
        from distributed.finders.batch_size import find_batch_size

        return find_batch_size(self._fits, train_data, start=start, max_size=max_size)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return loss and metrics over `data`, counting each sample once. Every rank must call it.

        Outside a worker it runs in this process.

        Args:
            data: data with targets, as for `fit`.

        Returns:
            The values by name, the same on all ranks.

        Raises:
            ConfigError: the data or a setting is wrong.
            ResourceError: a device is missing, or some ranks did not join.
        """
        measured: dict[str, float] = self._fits.open_session().evaluate(data)
        return measured

    def predict(self, data: Any, *, out: str | os.PathLike[str] | None = None, force: bool = False) -> Any:
        """Return the model's outputs for every sample of `data`, on the host, or write them into files.

        Every rank must call it. Every rank gets all outputs, unless `out` is given. The outputs are in the order of the data set,
        even if a DataLoader shuffles. With a custom sampler they are in the order of the sampler, and with `data.presharded` they
        come rank by rank. A batch is passed to the model as in training, without the last entry of a tuple (the targets).

        Tensors and arrays are joined along their first dimension, and lists with one entry per sample are concatenated. This
        also holds inside dicts, tuples and data classes. Tensors of different shapes are returned as a list with one entry per
        sample. Values that belong to no sample (a loss) are returned as a list with one entry per batch.

        Args:
            data: what `fit` takes, or one tensor or array of inputs with one sample per row.
            out: a directory into which each rank writes its own outputs, with the indices of their samples, so that no rank
                holds all outputs. `distributed.load_predictions(out)` returns all of them in order. All nodes must share the
                directory. Each output must be a tensor or an array with rows for each sample, or a list with one entry per sample.
            force: whether to replace the outputs of an earlier call in `out`. Those of a call that did not finish are always
                replaced.

        Returns:
            The outputs, in the structure that the model returns, or the directory `out`.

        Raises:
            ConfigError: the data or a setting is wrong, the Trainer has several models, `out` exists, or the files cannot hold an
                output. The error names that output.
            ResourceError: a device is missing, or some ranks did not join.
        """
        self._refuse_several("predict() calls one model: call trainer.model[NAME] on the inputs")
        if force and out is None:
            raise ConfigError("force=True has no effect without out=: name the directory, or drop force")
        return self._fits.open_session().predict(data, out, force=force)

    def metric_average(self, value: Any, name: str = "metric") -> float:
        """Return the mean of `value` over all ranks. Every rank must call it.

        Args:
            value: one number per rank.
            name: the name of the number, for error messages.

        Returns:
            The mean, the same on all ranks.

        Raises:
            ConfigError: `value` is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"metric_average({value!r}, name={name!r}) takes one number per rank: pass {name}.item()"
            ) from None
        average: float = self._fits.open_session().metric_average(number, name)
        return average

    def log(self, name: str, value: Any, reduce: str = "mean", *, on_every_rank: bool = False) -> None:
        """Log a number, an image or the like together with the metrics of the running fit.

        A single rank may call it; it is not a collective. Call it in `training_step`, `loss_fn` or a hook of a callback.

        Values that a step or `on_step_end` logs are reduced over the ranks and over the updates since the last log line. The
        result is part of the next log line, of `History` and of checkpoints. In a step, a mean weights each value by the number
        of samples in its micro-batch. In a validation step, the value is logged as `val_NAME`. Values that any other hook logs
        are recorded immediately, in a row of their own.

        Args:
            name: the name of the value.
            value: a number, a tensor with one element, or an `Image`, `Text`, `Table`, `Audio` or `Figure` of
                `distributed.loggers`. A tensor may stay on its device, because the step does not wait for it. Of images and the
                like, only those of the main process are kept, unless `on_every_rank` is set.
            reduce: "mean", "sum" or "max", for numbers.
            on_every_rank: whether to keep the value of each rank, as `NAME/rank_0`, `NAME/rank_1` and so on.

        Raises:
            ConfigError: no fit or evaluation runs in this process, the name is taken, or the value cannot be logged.
        """
        logged.log(name, value, reduce, on_every_rank=on_every_rank)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the trained state. Every rank must call it.

        Args:
            path: a file that ends in `.safetensors` gets the model's weights by name. Any other path is a directory
                that gets a checkpoint, which `resume_from_checkpoint` accepts.

        Returns:
            The path that was written.

        Raises:
            ConfigError: `path` is an address of object storage, or the checkpoint cannot be written.
        """
        refuse_address(path, "save()")
        if self._fits.remote is not None and Path(path).suffix != ".safetensors":
            return self._fits.remote.copy_checkpoint(Path(path))
        saved: Path = self._fits.open_session().save(Path(path))
        return saved

    def save_pretrained(self, path: str | os.PathLike[str]) -> Path:
        """Save a model of transformers, and the tokenizer or processor of this trainer, into a directory.

        Every rank must call it, and the main process writes. `AutoModel...from_pretrained(path)` and
        `AutoTokenizer.from_pretrained(path)` read the directory. For a model with PEFT adapters, only the adapters are saved.

        Args:
            path: the directory. It is created if it does not exist.

        Returns:
            The path.

        Raises:
            ConfigError: the model has no `save_pretrained`, the Trainer has several models, or `path` is an address of object
                storage.
        """
        refuse_address(path, "save_pretrained()")
        self._refuse_several("save_pretrained() saves one model: call it on trainer.model[NAME]")
        self._fits.open_session().save_pretrained(Path(path))
        return Path(path)

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[Any]:
        """Return a context manager that gives the main process the model with all of its weights.

        Every rank must enter and leave the context. The main process gets the module, and the other ranks get None. A
        callback may use it during `fit`. A sharded model is gathered into host memory, and changes to that copy are lost.

        Yields:
            The module on the main process, None on the other ranks.

        Raises:
            ResourceError: a device is missing, or some ranks did not join.
        """
        with self._fits.open_session().whole_model() as model:
            yield model

    def main_process_first(self, *, local: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return a context manager whose block runs on the main process first, and then on all other processes at once.

        Use it for work whose result the other processes need, such as a download or a file with prepared data. The block may take
        longer than `timeout_s`. Every rank must enter it. In a process that starts workers, the block runs immediately.

        Args:
            local: whether the first process of each node runs the block first. With False, only rank 0 does, which suits a
                directory that all nodes share.

        Returns:
            The context manager, for one `with` statement.

        Raises:
            TrainingError: on the ranks that waited, if the block failed on a rank before them. That rank raises its own error.
        """
        if self.setup.is_fit_in_workers:
            return contextlib.nullcontext()
        first: contextlib.AbstractContextManager[None] = self._fits.open_session().main_process_first(local)
        return first

    @property
    def model(self) -> Any:
        """The user's module, or a mapping of several modules by name. After `fit` it has the trained weights.

        After `fit`, the module is unsharded on every rank. With `fsdp` this holds only if every process has enough memory
        for it; otherwise a notice is printed. During `fit`, `fsdp` and ZeRO-3 keep the module sharded. `whole_model()`
        gathers it.
        """
        return self.job.model if self.backend.model is None else self.backend.model

    def _refuse_several(self, text: str) -> None:
        if self.job.names:
            raise ConfigError(text)

    @property
    def is_main_process(self) -> bool:
        """Return whether this process is rank 0, or the process that called `fit` and started workers, on node 0 if there are several."""
        return self.setup.is_main_process

    @property
    def job(self) -> Job:
        """The arguments of the constructor that say what to train."""
        return self.setup.job

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of the next `fit`, in the order in which their hooks are called.

        Add a callback to the list, or assign another list, before `fit` and on every rank.
        """
        return self.setup.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        """Replace the callbacks of the next `fit`."""
        self.setup.callbacks[:] = callbacks

    @property
    def history(self) -> History | None:
        """The history of the last fit, or None before the first one."""
        return self._fits.history

    @property
    def merged(self) -> MergedConfig:
        """The settings of the newest fit, each with its source."""
        return self._fits.merged

    @property
    def plan(self) -> ProcessPlan:
        """The numbers of processes and the device of a fit."""
        return self.setup.plan

    @property
    def backend(self) -> Backend[Any]:
        """The adapter of the backend."""
        return self._fits.backend

    @property
    def best_accuracy(self) -> float:
        """`History.best_accuracy` of the last fit. Raises ConfigError before the first fit."""
        if self.history is None:
            raise ConfigError("best_accuracy is not available before fit(): call fit() first")
        return self.history.best_accuracy


class PyTorchDDPTrainer(Trainer):
    """Trainer on PyTorch DistributedDataParallel. Options of the option group `ddp` may be passed directly: `static_graph=True`."""

    _backend = "pytorch-ddp"


class FSDPTrainer(Trainer):
    """Trainer on PyTorch FSDP2. Options of the option group `fsdp` may be passed directly: `cpu_offload=True`."""

    _backend = "fsdp"


class RayTrainer(Trainer):
    """Trainer whose processes Ray Train starts. Options of the option group `ray` may be passed directly: `engine="fsdp"`."""

    _backend = "ray"


class DeepSpeedTrainer(Trainer):
    """Trainer on DeepSpeed ZeRO. Options of the option group `deepspeed` may be passed directly: `zero_stage=3`."""

    _backend = "deepspeed"


class HorovodTrainer(Trainer):
    """Trainer on Horovod. Options of the option group `horovod` may be passed directly: `compression=hvd.Compression.fp16`."""

    _backend = "horovod"


class TensorFlowDistributedTrainer(Trainer):
    """Trainer for Keras models on TensorFlow. Options of the option group `tensorflow` may be passed directly."""

    _backend = "tensorflow"
