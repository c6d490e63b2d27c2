"""Keras models under the torch engines: the same numbers on any number of processes, kills, checkpoints and refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import numpy
import pytest

from tests.conformance.runs import FULL, OnFirstUse, digests, events, metrics, newest, progress
from tests.conftest import needs_backend

JOBS = Path(__file__).parent / "jobs"
SAME = [
    "default", "softmax", "compiled", "object", "rate", "scheduler", "lazy", "keras-loss", "names", "two-outputs", "tokens",
    "weighted", "step", "empty-slices",
]  # fmt: skip
pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module", autouse=True)
def _needs_keras():
    needs_backend("pytorch-ddp")
    if importlib.util.find_spec("keras") is None:
        if "keras" in os.environ.get("REQUIRE_BACKENDS", "") or "tensorflow" in os.environ.get("REQUIRE_BACKENDS", ""):
            pytest.fail("keras is not installed, and REQUIRE_BACKENDS names it")
        pytest.skip("keras is not installed here")


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_cli_once):
    """Return world size -> case -> arrays. Each world is started once, without KERAS_BACKEND in the environment."""

    def start(world):
        out = tmp_path_factory.mktemp(f"keras-{world}")
        command = [
            "train",
            "--script",
            str(JOBS / "keras_jobs" / "models.py"),
            "--backend",
            "single" if world == 1 else "pytorch-ddp",
        ]
        done = run_cli_once(
            [*command, "--nproc-per-node", str(world), "--run-dir", str(out / "run"), "--", str(out)], timeout=200
        )
        assert done.returncode == 0, done.output[-3000:]
        return {path.stem: dict(numpy.load(path)) for path in out.glob("*.npz")}, done.output, out

    return OnFirstUse(start)


def largest(one, other, begins=""):
    names = {key for key in one if key.startswith(begins)}
    assert names == {key for key in other if key.startswith(begins)} != set()
    return max(float(numpy.abs(one[key] - other[key]).max(initial=0.0)) for key in names)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize("case", SAME)
def test_weights_losses_and_metrics_agree_with_one_process_in_float64(results, case, world):
    one, many = results[1][0][case], results[world][0][case]
    assert all(value.dtype == numpy.float64 for name, value in one.items() if name.startswith("weight."))
    assert largest(one, many) < 1e-9


def test_accumulation_warm_up_and_rates_have_their_effect(results):
    cases, text, out = results[1]
    rows = metrics(out / "run" / "fit-3")
    rates = [row["learning_rate"] for row in rows if row["split"] == "train"]
    assert rates[:4] == pytest.approx([0.025, 0.0375, 0.05, 0.05])  # the logged rate is that of the next update
    assert cases["rate"]["row.learning_rate"] == pytest.approx(0.2)
    assert "learning_rate=0.2 replaces the optimizer's 0.05" in text
    assert cases["scheduler"]["row.learning_rate"] == pytest.approx([0.05, 0.025, 0.0125], rel=1e-6)


def test_the_default_loss_is_the_same_from_logits_and_from_probabilities(results):
    cases = results[1][0]
    assert largest(cases["default"], cases["softmax"], "row.loss") < 1e-9
    # A different learning rate shows that the comparison can fail.
    assert largest(cases["default"], cases["keras-loss"], "row.loss") > 1e-6


def test_names_are_keras_paths(results):
    names = {name for name in results[2][0]["normalized"] if name.startswith("weight.")}
    kinds = {name.rsplit("/", 1)[1] for name in names}
    assert kinds == {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "seed_generator_state"}
    assert all("/" in name and "_torch_params" not in name for name in names)


def test_default_losses_are_said_and_batch_dependent_layers_named(results):
    text = results[2][1]
    assert "cross-entropy of logits, as no softmax ends the model" in text
    assert "cross-entropy of probabilities, as a softmax ends the model" in text
    assert "results depend on the split of a batch because of batch_normalization (BatchNormalization), dropout" in text
    assert "absl" not in text and "oneDNN" not in text  # TensorFlow is not loaded


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(results):
    half, full = results[2][0]["bf16"], results[2][0]["fp32"]
    assert all(value.dtype == numpy.float32 for name, value in half.items() if name.startswith("weight."))
    assert 1e-6 < largest(half, full, "predicted") < 0.3


@pytest.mark.full  # workers are killed in test_resume.py, and those of Keras on TensorFlow in test_tensorflow.py
def test_killed_workers_change_no_bit(run_cli_once, tmp_path):
    def train(name, kills):
        # From three processes on, a resumed wrapper runs a pass with zero weight, whose random numbers must not count.
        flags = ["--backend", "pytorch-ddp", "--nproc-per-node", "3", "--run-dir", str(tmp_path / name)]
        done = run_cli_once(
            ["train", "--script", str(JOBS / "keras_jobs" / "resume.py"), *flags, "--", json.dumps(kills)], timeout=120
        )
        assert done.returncode == 0, done.output
        return newest(tmp_path / name)

    clean, hurt = train("clean", []), train("hurt", [[2, 0], [16, 1]])

    assert events(tmp_path / "hurt").count("restarted") == 2
    assert digests(clean) == digests(hurt)
    assert progress(clean) == progress(hurt)
    assert metrics(tmp_path / "clean") == metrics(tmp_path / "hurt")
    _open_on_tensorflow(run_cli_once, clean, tmp_path)


OTHER_ENGINE = """
import json, pathlib, sys
import keras
from distributed.backends._keras import files
checkpoint, out = map(pathlib.Path, sys.argv[1:])
keras.layers.Dense(3)  # so that automatic names differ
layers = keras.layers
model = keras.Sequential([
    keras.Input((12,)), layers.Dense(24), layers.BatchNormalization(), layers.Dropout(0.2, seed=1), layers.Dropout(0.2), layers.Dense(5),
])
optimizer = keras.optimizers.Adam(1e-3)
optimizer.build(model.trainable_variables)
files.load_model(model, checkpoint)
state = json.loads((checkpoint / "state.json").read_text())
content = next(each for each in _dicts(state) if str(each.get("class", "")).startswith("keras."))
files.load_optimizer(optimizer, model, checkpoint, content)
files.save_model(model, out)
again = files.save_optimizer(optimizer, model, out)
print(keras.backend.backend(), again["iterations"])
"""
DICTS = """
def _dicts(value):
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _dicts(each)
"""


def _open_on_tensorflow(run, checkpoint, tmp_path):
    """Open the checkpoint of the test in a process whose Keras runs on TensorFlow. Weights and optimizer state must be the same."""
    if importlib.util.find_spec("tensorflow") is None:
        return
    import subprocess

    from safetensors.numpy import load_file

    environ = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(JOBS.parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", DICTS + OTHER_ENGINE, str(checkpoint), str(tmp_path / "tf")],
        env=environ, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["tensorflow", "21"]
    for part in ("model", "optimizer"):
        one = load_file(checkpoint / part / f"{part}.safetensors")
        other = load_file(tmp_path / "tf" / part / f"{part}.safetensors")
        assert len(one) == len(other) >= 8
        sums = [sorted(float(value.astype("float64").sum()) for value in each.values()) for each in (one, other)]
        assert sums[0] == sums[1]


@pytest.mark.parametrize("engine", [pytest.param("tensorflow", marks=pytest.mark.full), "torch"])
def test_a_model_of_a_plain_script_reaches_its_workers_and_comes_back(start, tmp_path, engine):
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed here")
    environ = {"KERAS_HOME": str(tmp_path)}
    (tmp_path / "keras.json").write_text(json.dumps({"backend": engine}))
    done = start([sys.executable, str(JOBS / "keras_jobs" / "plain.py")], cwd=tmp_path, env=environ).finish(150)
    assert done.returncode == 0, done.output
    assert f"{engine}: 6 steps, moved True, accuracy True" in done.stdout
    # On the workers' engine the model is float64, as in the workers. On another engine it stays float32.
    assert ("rounded by 0e+00" in done.stdout) is (engine == "torch"), done.stdout
    if engine == "torch":
        assert "['accuracy', 'loss']" in done.stdout
    else:
        assert "Keras runs on 'tensorflow' in this process, and backend='single' needs it on 'torch'" in done.stdout


def test_another_engine_than_the_backend_needs_is_one_line(run_cli, tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed here")
    script = tmp_path / "train.py"
    script.write_text(
        "import keras\nfrom distributed import Trainer\n"
        "Trainer(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])).fit([0] * 4)\n"
    )
    done = run_cli(
        ["train", "--script", str(script), "--backend", "pytorch-ddp", "--nproc-per-node", "1"], cwd=tmp_path,
        env={"KERAS_BACKEND": "tensorflow"},
    )  # fmt: skip
    assert done.returncode == 2, done.output
    assert "KERAS_BACKEND='tensorflow' does not fit backend='pytorch-ddp', which needs Keras on 'torch'" in done.stderr
    assert "Traceback" not in done.output


def test_what_the_step_would_leave_out_or_contradict_is_refused(start, tmp_path):
    done = start(
        [sys.executable, str(JOBS / "keras_jobs" / "refused.py")], cwd=tmp_path, env={"KERAS_BACKEND": "torch"}
    ).finish(120)  # fmt: skip
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {
        "own step": "override compute_loss",
        "torch optimizer": "the optimizer is a SGD, but the model is a Keras model: pass a Keras optimizer",
        "torch schedule": "the scheduler factory failed when it was called for a Keras model (AdamW is not an Optimizer): pass a schedule of keras",
        "accumulating": "set gradient_accumulation_steps of the Trainer instead",
        "scaling": "set mixed_precision='fp16'",
        "loss scale": "pass its inner optimizer",
        "averages": "set ema_overwrite_frequency",
        "other variables": "was built for other variables",
        "frozen": "no trainable variable",
        "rate of a schedule": "cannot replace the rates of CosineDecay",
        "epochs of a schedule": "counts updates",
        "sum": "use SparseCategoricalCrossentropy(), which averages",
        "muon": "optimizer='muon' does not work with Keras models: choose adamw, or pass keras.optimizers.Muon(...)",
        "layer rates": "layer_rates names 'nosuch', but no trainable parameter begins with it",
        "recomputing": "keras.RematScope()",
        "several models": "models['a'] is a Keras model: pass torch modules, or train it alone, Trainer(model)",
        "fsdp": "does not take Keras models: fully_shard replaces the parameters",
        "deepspeed": "does not take Keras models: its engine replaces the parameters",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert text in found[name] and "\n" not in found[name], (name, found[name])


@pytest.fixture(scope="module", params=["single", "tensorflow"])
def named(request, run_cli_once, tmp_path_factory):
    """Return case -> (weights of the Trainer, weights by hand), and the output of the script."""
    needs_backend(request.param)
    out = tmp_path_factory.mktemp(request.param)
    command = [
        "train",
        "--script",
        JOBS / "keras_jobs" / "named.py",
        "--backend",
        request.param,
        "--nproc-per-node",
        "1",
    ]
    done = run_cli_once([*command, "--run-dir", out / "run", "--", out], timeout=200)
    assert done.returncode == 0, done.output
    return json.loads((out / "weights.json").read_text()), done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "adam",
        "adam-betas",
        "adafactor",
        "adamw",
        "adam-decay",
        "sgd-decay",
        "sgd-rates",
        "adamw-rates",
        "adafactor-rates",
    ],
)
def test_a_named_optimizer_makes_the_updates_of_the_one_of_keras(named, case):
    found, by_hand = named[0][case]
    assert len(found) == 6 * 8 + 8 + 2 * 8 + 8 + 1 and found == pytest.approx(by_hand, abs=1e-6)
    others = [weights for name, (weights, _) in named[0].items() if name != case]
    assert all(numpy.abs(numpy.subtract(found, other)).max() > 1e-3 for other in others)


@pytest.mark.full
def test_what_decays_in_a_keras_model_is_told_once(named):
    told = "weight_decay=0.3 on 1 of 4 parameters: not on biases and norms"
    before, _, of_adamw = named[1].partition("--- adamw")
    assert of_adamw.count(told) == 1 and "weight_decay" not in before


@pytest.mark.full
def test_the_summary_shows_the_layers_of_a_keras_model(named):
    rows = re.findall(r"^\w+ +\w+ +\d+ parameters.*$", named[1], re.M)
    assert rows == [
        "frozen  Dense               56 parameters, 56 of them frozen",
        "norm    LayerNormalization  16 parameters",
        "bend    Activation           0 parameters",
        "head    Dense                9 parameters",
        "all     Sequential          81 parameters, 56 of them frozen",
    ]
