"""Call the hooks of callbacks of Keras from ours. Loads no framework."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.callbacks.base import Callback
from distributed.errors import ConfigError
from distributed.metrics.direction import is_larger_better
from distributed.metrics.of_keras import keras_classes

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState

# Callbacks of Keras that reach into its own `fit`, or do what a setting does -> what to use instead.
_REFUSED = {
    "ModelCheckpoint": "set checkpoint_frequency or checkpoint_every_n_steps, and keep_best",
    "OrbaxCheckpoint": "set checkpoint_frequency or checkpoint_every_n_steps, and keep_best",
    "BackupAndRestore": "set resume_from_checkpoint=True, or pass --resume to 'distributed train'",
    "ReduceLROnPlateau": "set scheduler, for example scheduler='cosine', or stop with early_stopping_patience",
    "LearningRateScheduler": "set scheduler, to a name or to an object of keras.optimizers.schedules",
    "TensorBoard": "set tensorboard=True",
    "SwapEMAWeights": (
        "pass distributed.callbacks.ExponentialMovingAverage(...) on PyTorch's engines; on TensorFlow, set use_ema=True and"
        " ema_overwrite_frequency in the optimizer"
    ),
    "ProgbarLogger": "set verbose=True, which shows the progress",
    "History": "use the History that fit() returns",
    "CallbackList": "pass its callbacks as a list",
}
_NEVER_CALLED = ("on_train_batch_begin", "on_batch_begin", "on_test_batch_begin", "on_test_batch_end")
_OF_MAIN_PROCESS = ("CSVLogger", "RemoteMonitor")  # these write what one process should write
_STATE = ("wait", "stopped_epoch", "best", "best_epoch")  # of EarlyStopping
_NO_METRICS = ("epoch", "step", "learning_rate", "samples_per_second")
_VALIDATION = "val_"


def as_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks with those of Keras wrapped. Raises ConfigError for a callback of Keras that does not work here."""
    return [_wrapped(each) if _kinds(each) and not isinstance(each, Callback) else each for each in callbacks]


def _wrapped(callback: Any) -> KerasCallback:
    kinds = _kinds(callback)
    for kind in kinds:
        if kind in _REFUSED:
            raise ConfigError(f"keras.callbacks.{kind} does not work with the Trainer's own loop: {_REFUSED[kind]}")
    name = type(callback).__name__
    if getattr(callback, "restore_best_weights", False):
        raise ConfigError(
            f"{name}(restore_best_weights=True) does not work with the Trainer's own loop: drop it and set keep_best=True, which"
            " keeps the best checkpoint, for distributed.load_weights(model, run_dir)"
        )
    for hook in _NEVER_CALLED:
        if _overrides(callback, hook):
            raise ConfigError(
                f"{name}.{hook} would never be called, because a batch is divided among the processes: use on_train_batch_end or"
                " on_test_end"
            )
    has_batch_hook = _overrides(callback, "on_train_batch_end") or _overrides(callback, "on_batch_end")
    return (KerasBatchCallback if has_batch_hook else KerasCallback)(callback)


def _kinds(value: Any) -> list[str]:
    """Return the names of the Keras callback classes of `value`, the most derived first. Empty if it is no callback of Keras."""
    kinds = [cls.__name__ for cls in keras_classes(value)]
    return kinds if "Callback" in kinds or "CallbackList" in kinds else []


def _overrides(callback: Any, hook: str) -> bool:
    base = next(cls for cls in keras_classes(callback) if cls.__name__ == "Callback")
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook)


class KerasCallback(Callback):
    """Call the hooks of one callback of Keras.

    `model.stop_training` ends training as `context.stop` does. The state of EarlyStopping, and what a `state_dict` of the
    callback returns, are part of checkpoints.
    """

    def __init__(self, callback: Any) -> None:
        self.keras = callback
        self._kept: Mapping[str, Any] | None = None  # state of an earlier fit, which `on_train_begin` would reset
        self._epoch_step = 0  # step at which the epoch began
        self._has_begun = False
        self._marked: Any = None  # a model that got the attribute `stop_training`

    def __repr__(self) -> str:
        return repr(self.keras)

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, state: TrainState) -> None:
        context, callback = self.context, self.keras
        if not hasattr(context.model, "stop_training"):
            self._marked = context.model
        context.model.stop_training = False
        if self._is("EarlyStopping"):
            self._set_mode()
        callback.set_model(context.model)
        callback.set_params(
            {
                "epochs": context.config.epochs,
                "steps": context.updates_per_epoch,
                "verbose": int(context.config.verbose),
            }
        )
        kept = self.state_dict() if self._has_begun else self._kept
        if kept is not None and self._is("CSVLogger") and not callback.append and context.worker.is_main_process:
            _drop_rows_from(Path(callback.filename), callback.sep, state.epoch)
            callback.append = True
        self._call("on_train_begin", {})
        if kept is not None:
            self.load_state_dict(kept)
        self._has_begun = True

    def on_epoch_start(self, state: TrainState) -> None:
        if not state.samples_in_epoch:
            self._epoch_step = state.step
        self._call("on_epoch_begin", state.epoch, {})

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        self._call("on_epoch_end", state.epoch - 1, _logs(metrics))

    def on_validation_start(self, state: TrainState) -> None:
        self._call("on_test_begin", {})

    def on_validation_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        logs = {k.removeprefix(_VALIDATION): v for k, v in metrics.items() if k.startswith(_VALIDATION)}
        if logs:
            self._call("on_test_end", logs)

    def on_train_end(self, state: TrainState) -> None:
        self._call("on_train_end", _logs(state.rows[-1]) if state.rows else {})
        self._unmark()

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self._unmark()

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook, and end training if the hook has set `model.stop_training`."""
        context = self.context
        if self._is(*_OF_MAIN_PROCESS) and not context.worker.is_main_process:
            return
        was_stopped = getattr(context.model, "stop_training", False)
        getattr(self.keras, hook)(*arguments)
        if getattr(context.model, "stop_training", False) and not was_stopped:
            context.stop(f"{type(self.keras).__name__} set stop_training")

    def _set_mode(self) -> None:
        """Set the mode "auto" to the direction of the monitor. Keras knows it only of metrics of a compiled model."""
        callback, context = self.keras, self.context
        is_larger = is_larger_better(callback.monitor) if callback.mode == "auto" else None
        if is_larger is not None:
            callback.mode = "max" if is_larger else "min"
        elif callback.mode == "auto" and not getattr(context.model, "compiled", False):
            name = type(callback).__name__
            raise ConfigError(
                f"{name}(monitor={callback.monitor!r}) does not say whether larger values are better: pass mode='max' or mode='min'"
            )

    def _is(self, *names: str) -> bool:
        return any(kind in names for kind in _kinds(self.keras))

    def _unmark(self) -> None:
        if self._marked is not None and hasattr(self._marked, "stop_training"):
            del self._marked.stop_training
        self._marked = None

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch_step": self._epoch_step}
        if self._is("EarlyStopping"):
            state["early_stopping"] = {name: _plain(getattr(self.keras, name, None)) for name in _STATE}
        if callable(getattr(self.keras, "state_dict", None)):
            state["own"] = self.keras.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept, self._epoch_step = state, state["epoch_step"]
        for name, value in state.get("early_stopping", {}).items():
            setattr(self.keras, name, value)
        if "own" in state:
            self.keras.load_state_dict(state["own"])


class KerasBatchCallback(KerasCallback):
    """Call the hooks of a callback of Keras that has a hook after each update. Each update then waits for the device."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        batch = state.step - self._epoch_step - 1
        self._call("on_train_batch_end", batch, _logs(self.context.means_of_epoch()))


def _logs(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in _NO_METRICS}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int) else float(value)


def _drop_rows_from(path: Path, separator: str, epoch: int) -> None:
    """Remove the rows of a CSV file of Keras that are of `epoch` or later, because a resumed run writes them again."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        rows = list(csv.reader(file, delimiter=separator))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows(row for number, row in enumerate(rows) if row and (number == 0 or int(row[0]) < epoch))
