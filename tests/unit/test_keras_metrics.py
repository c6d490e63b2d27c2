"""Compiled metrics of models with several outputs are those of Keras's own evaluate()."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, keras, numpy, torch
from torch.utils.data import TensorDataset
from distributed import ConfigError, Trainer, over_all
from distributed.backends._keras.losses import compiled_metrics, metric_value, of_output

x, one, other = (numpy.random.default_rng(0).normal(size=(7, n)).astype("float32") for n in (4, 1, 2))
found = {}
for form in ("list", "dict", "dict of outputs, list of targets"):
    inputs = keras.Input((4,))
    outputs, targets = [keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(2, name="b")(inputs)], [one, other]
    measures = [["mse"], ["mae"]]
    if form != "list":
        outputs, measures = dict(zip("uv", outputs)), dict(zip("uv", measures))
    if form == "dict":
        targets = dict(zip("uv", targets))
    model = keras.Model(inputs, outputs)
    model.compile(loss=keras.tree.map_structure(lambda _: "mse", outputs), metrics=measures)
    found[form] = theirs, ours = model.evaluate(x, targets, verbose=0, return_dict=True), {}
    y, predicted = keras.tree.map_structure(torch.as_tensor, targets), model(x)
    for name, (metric, place, _) in compiled_metrics(model, y, predicted).items():
        total, count = metric_value(metric, of_output(y, place), of_output(predicted, place))
        ours[name] = float(total / count)
x = torch.as_tensor(numpy.random.default_rng(1).normal(size=(61, 4)).astype("float32"))
y = (x.sum(1, keepdim=True) > 0.3).float()
def makes():
    return [keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="rmse"), Largest(name="largest")]
class Largest(keras.metrics.Metric):
    def __init__(self, name=None, dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.value = self.add_weight(name="value", initializer="zeros")
    def update_state(self, targets, outputs, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(outputs)))
    def result(self):
        return self.value.value
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
model.compile(loss="binary_crossentropy", metrics=makes()[:2])
metrics = {"given": keras.metrics.Precision(), "largest": makes()[2], "missed": over_all(keras.metrics.mean_absolute_error)}
trainer = Trainer(model, metrics=metrics, batch_size=7, epochs=1, verbose=False)
row = trainer.fit(TensorDataset(x, y), TensorDataset(x, y)).rows[-1]
outputs = trainer.predict(TensorDataset(x, y))
ours, theirs = {name: row["val_" + name] for name in ("auc", "rmse", "given", "largest", "missed")}, {}
for name, metric in zip(("auc", "rmse", "largest", "given"), [*makes(), keras.metrics.Precision()]):
    metric.update_state(y, outputs)
    theirs[name] = float(metric.result())
theirs["missed"] = float((y - outputs).abs().mean())
found["over all"] = [theirs, ours]

def step(model, batch):
    outputs = model(batch[0])
    loss = torch.nn.functional.binary_cross_entropy(outputs, batch[1])
    return {"loss": loss, "auc": (outputs, batch[1]), "mse": (outputs, batch[1])}
metrics = {"auc": keras.metrics.AUC(), "mse": keras.metrics.MeanSquaredError()}
plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
trainer = Trainer(plain, training_step=step, metrics=metrics, batch_size=7, epochs=1, verbose=False)
row = trainer.fit(TensorDataset(x, y), TensorDataset(x, y)).rows[-1]
theirs = {}
for name, metric in {"auc": keras.metrics.AUC(), "mse": keras.metrics.MeanSquaredError()}.items():
    metric.update_state(y, trainer.predict(TensorDataset(x, y)))
    theirs[name] = float(metric.result())
def compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "mae"])
    return model
def watched(model, monitor):
    trainer = Trainer(model, batch_size=7, epochs=1, verbose=False, monitor=monitor, monitor_mode="max")
    try:
        best = trainer.fit(TensorDataset(x, y), *([TensorDataset(x, y)] if monitor.startswith("val_") else [])).best_metrics
        return best[monitor] == max(row[monitor] for row in trainer.history.rows)
    except ConfigError as error:
        return f"{error}, after update {trainer.backend.update.step}"
found["monitors"] = [
    [watched(model, monitor) for monitor in ("val_auc", "auc", "val_mae", "val_aux")] for model in (compiled(), compiled)
]
found["of a step"] = [theirs, {name: row["val_" + name] for name in theirs}]
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed here")
def test_each_metric_is_of_its_own_output_and_of_all_samples(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True, cwd=tmp_path,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    unknown = "monitor='val_aux' is not reported (did you mean 'val_auc'?): choose one of val_loss, "
    for *right, wrong in found.pop("monitors"):  # of a model, and of a factory of one
        assert right == [True] * 3
        assert wrong.startswith(unknown) and wrong.endswith(", after update 1")
    for samples in ("over all", "of a step"):
        theirs, ours = found.pop(samples)
        assert ours == pytest.approx(theirs, abs=1e-6), samples
    assert set(found["list"][1]) == {"a_mse", "b_mae"}
    for form, (theirs, ours) in found.items():
        assert len(ours) == 2, form
        assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-5), form
