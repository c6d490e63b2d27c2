"""Callbacks of Keras run in our loop: their hooks, their exact resume, and refusals that name our setting."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, math, pathlib, warnings
import keras, numpy
from distributed import Callback, ConfigError, Trainer
from distributed.callbacks.of_keras import as_callbacks

callbacks = keras.callbacks
draw = numpy.random.default_rng(0)
X = draw.normal(size=(40, 4)); Y = (X.sum(1) > 0).astype("int64")
SETTINGS = {"batch_size": 8, "verbose": False, "loss_fn": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
found = {}

def net():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "softmax")])

def sgd(variables):
    return keras.optimizers.SGD(0.5)

def trained(used, epochs=2, **settings):
    trainer = Trainer(net, optimizer=sgd, callbacks=used, **{**SETTINGS, **settings})
    history = trainer.fit(x=X, y=Y, validation_data=(X, Y), epochs=epochs)
    rows = [{k: v for k, v in row.items() if k != "samples_per_second"} for row in history.rows]
    return rows, [w.tolist() for w in trainer.model.get_weights()], history

class OwnStep(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None): ...
class OwnTest(callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None): ...
class OwnSchedule(callbacks.LearningRateScheduler): ...

def refusal(make, **arguments):
    try:
        Trainer(net(), **{"callbacks": [make()], **arguments})
    except ConfigError as error:
        return str(error)

found["refused"] = {
    "ModelCheckpoint": refusal(lambda: callbacks.ModelCheckpoint("m.keras")),
    "BackupAndRestore": refusal(lambda: callbacks.BackupAndRestore("backup")),
    "ReduceLROnPlateau": refusal(callbacks.ReduceLROnPlateau),
    "LearningRateScheduler": refusal(lambda: OwnSchedule(lambda epoch: 0.1)),
    "TensorBoard": refusal(callbacks.TensorBoard),
    "SwapEMAWeights": refusal(callbacks.SwapEMAWeights),
    "History": refusal(callbacks.History),
    "restore": refusal(lambda: callbacks.EarlyStopping(restore_best_weights=True)),
    "batch begin": refusal(OwnStep),
    "lambda": refusal(lambda: callbacks.LambdaCallback(on_train_batch_begin=print)),
    "test batch": refusal(OwnTest),
    "loss": refusal(lambda: Callback(), loss_fn="sparse_categorical_crosentropy"),
    "metric": refusal(lambda: Callback(), metrics=["acuracy"]),
    "names": refusal(lambda: Callback(), loss_fn="mse", metrics=["acc", "mae", "AUC"]),
}

# Hooks of every kind, and a value that a hook of ours logs after one of Keras's has read the metrics of the step.
seen = []
class Logs(Callback):
    def on_step_end(self, state, result):
        self.context.log("own", state.step)
lambdas = callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: seen.append(["begin", epoch]),
    on_epoch_end=lambda epoch, logs: seen.append(["end", epoch, sorted(logs)]),
    on_train_batch_end=lambda batch, logs: seen.append([batch, logs["loss"], logs["accuracy"]]),
)
rows, weights, _ = trained([lambdas, Logs()])
plain_rows, plain_weights, _ = trained([Logs()])
found["seen"], found["rows"] = seen, rows
found["changes nothing"] = [rows == plain_rows, weights == plain_weights]
without = as_callbacks([callbacks.EarlyStopping(), callbacks.CSVLogger("log.csv")])
found["no hook in a step"] = [type(each).on_step_end is Callback.on_step_end for each in without]

# The direction of a metric that Keras does not know, because the model is not compiled
stopping = callbacks.EarlyStopping("val_accuracy", patience=1, min_delta=2.0)
_, _, history = trained([stopping], 9)
found["direction"] = [stopping.mode, len(history.rows), history.stop_reason]
try:
    trained([callbacks.EarlyStopping("val_things")])
except ConfigError as error:
    found["direction"].append(str(error))

# Exact resume: state of EarlyStopping and rows of CSVLogger
def used(name):
    return [callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.05), callbacks.CSVLogger(name), Counting()]
class Counting(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = 0
    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
    def state_dict(self):
        return {"epochs": self.epochs}
    def load_state_dict(self, state):
        self.epochs = state["epochs"]
whole = used("whole.csv")
rows, weights, history = trained(whole, 30)
parts = used("parts.csv")
_, _, begun = trained(parts, 4, keep_latest_k=9)
checkpoint = pathlib.Path(begun.run_dir) / "checkpoints" / "step-00000015"
again = used("parts.csv")
more_rows, more_weights, more = trained(again, 30, resume_from_checkpoint=str(checkpoint))
found["resumed"] = {
    "rows": [rows == more_rows, weights == more_weights], "reasons": [history.stop_reason, more.stop_reason],
    "epochs": [len(rows), *(each[2].epochs for each in (whole, again))],
    "state": [[each[0].wait, each[0].best, each[0].stopped_epoch] for each in (whole, again)],
    "files": [pathlib.Path(name).read_text() for name in ("whole.csv", "parts.csv")],
}

# NaN: the policy of the run comes first
nan = X.copy(); nan[20] = math.nan
X, before = nan, X
_, _, history = trained([callbacks.TerminateOnNaN()], nan_policy="warn", shuffle=False)
found["nan"] = [history.stop_reason, history.steps]
print(json.dumps(found, default=float))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed here")
    environ = {
        **os.environ,
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("keras"),
        timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "ModelCheckpoint",
            "keras.callbacks.ModelCheckpoint does not work with the Trainer's own loop: set checkpoint_frequency",
        ),
        ("BackupAndRestore", "set resume_from_checkpoint=True"),
        ("ReduceLROnPlateau", "set scheduler, for example scheduler='cosine'"),
        (
            "LearningRateScheduler",
            "keras.callbacks.LearningRateScheduler does not work with the Trainer's own loop: set scheduler",
        ),
        ("TensorBoard", "set tensorboard=True"),
        ("SwapEMAWeights", "pass distributed.callbacks.ExponentialMovingAverage"),
        ("History", "use the History that fit() returns"),
        (
            "restore",
            "EarlyStopping(restore_best_weights=True) does not work with the Trainer's own loop: drop it and set keep_best",
        ),
        ("batch begin", "OwnStep.on_train_batch_begin would never be called"),
        ("lambda", "LambdaCallback.on_train_batch_begin would never be called"),
        ("test batch", "OwnTest.on_test_batch_end would never be called"),
        (
            "loss",
            "loss_fn='sparse_categorical_crosentropy' is not a name in keras.losses (did you mean"
            " 'sparse_categorical_crossentropy'?): pass one of its names, or an object or function",
        ),
        ("metric", "metrics['acuracy']='acuracy' is not a name in keras.metrics (did you mean 'accuracy'?)"),
    ],
)
def test_what_reaches_into_the_fit_of_keras_is_refused_with_our_setting(found: Any, name: str, said: str) -> None:
    assert said in found["refused"][name] and "\n" not in found["refused"][name]


def test_names_of_keras_are_accepted(found: Any) -> None:
    assert found["refused"]["names"] is None


def test_hooks_get_the_means_of_the_epoch_and_change_no_number(found: Any) -> None:
    names = ["accuracy", "loss", "own", "val_accuracy", "val_loss"]
    seen, rows = found["seen"], found["rows"]
    assert [each for each in seen if len(each) == 2] == [["begin", 0], ["begin", 1]]
    assert [each for each in seen if each[0] == "end"] == [["end", 0, names], ["end", 1, names]]
    batches = [each for each in seen if isinstance(each[0], int)]
    assert [each[0] for each in batches] == [0, 1, 2, 3, 4] * 2
    assert batches[4][1:] == pytest.approx([rows[0]["loss"], rows[0]["accuracy"]], rel=1e-6)
    assert rows[0]["own"] == 3.0 and rows[1]["own"] == 8.0  # the means of 1 to 5 and of 6 to 10
    assert found["changes nothing"] == [True, True]
    assert found["no hook in a step"] == [True, True]


def test_early_stopping_knows_the_direction_of_metrics_of_the_trainer(found: Any) -> None:
    mode, epochs, reason, refused = found["direction"]
    assert (mode, epochs, reason) == ("max", 2, "EarlyStopping set stop_training")
    assert refused == (
        "EarlyStopping(monitor='val_things') does not say whether larger values are better: pass mode='max' or mode='min'"
    )


def test_a_resumed_run_stops_and_logs_as_if_it_had_not_been_interrupted(found: Any) -> None:
    resumed = found["resumed"]
    assert resumed["rows"] == [True, True]
    assert resumed["reasons"] == ["EarlyStopping set stop_training"] * 2
    whole, *epochs = resumed["epochs"]
    assert epochs == [whole, whole] and 5 < whole < 30
    assert resumed["state"][0] == resumed["state"][1] and resumed["state"][0][0] == 2
    one, other = resumed["files"]
    assert one == other and len(one.splitlines()) == whole + 1


def test_a_loss_that_is_not_a_number_ends_the_run(found: Any) -> None:
    assert found["nan"] == ["TerminateOnNaN set stop_training", 3]
