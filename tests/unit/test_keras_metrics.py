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
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed here")
def test_each_metric_is_of_its_own_output():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "KERAS_BACKEND": "torch"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["list"][1]) == {"a_mse", "b_mae"}
    for form, (theirs, ours) in found.items():
        assert len(ours) == 2, form
        assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-5), form
