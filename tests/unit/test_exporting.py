"""`distributed.export` and `distributed export`: each file is what the model computes, and what cannot be held is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distributed
from distributed import ConfigError, Trainer
from distributed.backends._torch.several_models import joined
from distributed.backends._torch.world import leave_group
from distributed.backends.exporting import check_format
from distributed.cli.__main__ import run
from distributed.training.files import _Taken
from tests.conftest import needs_backend

ROOT = Path(__file__).resolve().parents[2]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = self.body(x)
        return {"scores": found if scale is None else found * scale, "chosen": found.argmax(-1)}


class Bessel(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


class Decides(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class OneSize(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(5, 4).cumsum(0)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().eval()


def test_an_onnx_file_gives_the_models_outputs_for_any_batch_size(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = net().train()

    done = distributed.export(model, None, tmp_path / "net.onnx", format="onnx", example=X)

    assert done.difference is not None and done.difference < 1e-5 and done.takes_any_batch_size
    assert model.training and model.body[2].training
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    for size in (1, 5, 64):
        inputs = torch.randn(size, 4)
        scores, chosen = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        expected = model.eval()(inputs)
        numpy.testing.assert_allclose(scores, expected["scores"].detach(), rtol=1e-4, atol=1e-5)
        assert chosen.shape == (size,)


def test_a_program_of_torch_export_takes_named_inputs_and_holds_no_sample(tmp_path):
    model = net()
    inputs = {"x": X, "scale": torch.full((5, 1), 3.0)}

    distributed.export(model, None, tmp_path / "net.pt2", format="torch-export", example=inputs)

    program = torch.export.load(tmp_path / "net.pt2")
    assert not program.example_inputs
    more = {"x": torch.randn(9, 4), "scale": torch.rand(9, 1)}
    assert torch.equal(program.module()(**more)["scores"], model(**more)["scores"])


def test_a_batch_size_that_the_model_fixes_is_said(tmp_path):
    done = distributed.export(OneSize(), None, tmp_path / "one.pt2", format="torch-export", example=X)
    assert not done.takes_any_batch_size


def test_weights_that_need_a_second_onnx_file_are_refused(tmp_path, monkeypatch):
    from distributed.backends._torch import programs

    monkeypatch.setattr(programs, "_ONNX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"the format 'onnx' holds at most 100 in one file") as error:
        programs.write(net(), tmp_path / "net.onnx", "onnx", X)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config)
    inputs = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}

    done = distributed.export(model, None, tmp_path / "bert", format="huggingface", example=inputs)

    assert done.difference == 0.0
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert").eval()
    assert torch.equal(again(**inputs).logits, model.eval()(**inputs).logits)
    assert list((tmp_path / "bert").glob("*.bin")) == []
    distributed.export(model, None, tmp_path / "bert.pt2", format="torch-export", example=inputs)


def test_an_operator_that_the_format_cannot_hold_is_named_and_nothing_is_left(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "kept.onnx").write_text("before")
    for model, path, form, words in [
        (Bessel(), "kept.onnx", "onnx", r"^the format 'onnx' cannot hold the operator prims\.bessel_j0"),
        (
            Decides(),
            "net.pt2",
            "torch-export",
            r"a decision on the value of a tensor \(aten.item\) at test_exporting.py:\d+ \(if x",
        ),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            distributed.export(model, None, tmp_path / path, format=form, example=X, force=True)
        assert "\n" not in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["kept.onnx"]
    assert (tmp_path / "kept.onnx").read_text() == "before"


def test_a_file_that_computes_something_else_is_an_error(tmp_path, monkeypatch):
    from distributed.backends._torch import programs

    monkeypatch.setattr(
        programs, "_loaded", lambda path: lambda x: {"scores": net()(x)["scores"] + 0.01, "chosen": net()(x)["chosen"]}
    )
    with pytest.raises(ConfigError, match=r"differs from the model by 1\.0e-02 for the same batch"):
        distributed.export(net(), None, tmp_path / "net.pt2", format="torch-export", example=X)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_one_line(tmp_path):
    (tmp_path / "here.onnx").write_text("before")
    for words, arguments in {
        r"format='onx' is not a format \(did you mean 'onnx'\?\)": {"format": "onx"},
        "pass example=inputs": {"format": "torch-export", "path": "net.pt2", "example": None},
        r"holds models of transformers, and this is a torch module \(Net\): choose one of safetensors, onnx, torch-export": {
            "format": "huggingface", "path": "net",
        },
        "holds Keras models on TensorFlow": {"format": "savedmodel", "path": "net"},
        "name a file that ends with .pt2, such as": {"format": "torch-export", "path": "net.onnx"},
        "already exists": {"format": "onnx", "path": "here.onnx"},
        "does not suit the format 'onnx': name a file that ends with .onnx, such as": {"path": "."},
        "the model does not take the example: .*: pass the inputs of one batch": {"example": (X, X, X)},
    }.items():  # fmt: skip
        given: dict[str, Any] = {"path": "net.onnx", "format": "onnx", "example": X, **arguments}
        with pytest.raises(ConfigError, match=words):
            distributed.export(net(), None, tmp_path / given.pop("path"), **given)
    with pytest.raises(ConfigError, match="model is a int"):
        distributed.export(lambda: 3, None, tmp_path / "a.safetensors", format="safetensors")


def test_one_of_several_models_is_exported_in_code(tmp_path):
    models = joined({"g": net(), "d": net()}, lambda model: model)
    with pytest.raises(
        ConfigError, match=r"'torch-export' holds one model, and there are g, d: .*trainer\.model\['g'\]"
    ):
        distributed.export(models, None, tmp_path / "net.pt2", format="torch-export", example=X)
    distributed.export(models["g"], None, tmp_path / "net.pt2", format="torch-export", example=X)
    distributed.export(models, None, tmp_path / "both.safetensors", format="safetensors")


def test_a_missing_library_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("distributed.backends.exporting.is_installed", lambda name: name != "onnxscript")
    with pytest.raises(
        distributed.ResourceError, match=r"needs onnxscript, which is not installed: run pip install onnxscript$"
    ):
        distributed.export(net(), None, tmp_path / "net.onnx", format="onnx", example=X)


# ------------------------------------------------------------------ the command

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
width = int(sys.argv[1]) if len(sys.argv) > 1 else 6
trainer = Trainer(lambda: torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)),
                  epochs=2, batch_size=8, verbose=False, device="cpu", backend="fsdp")
trainer.fit(TensorDataset(x, (x.sum(1) > 0).long()))
open("went-on", "w").close()
"""


BESSEL = """
import torch
class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with train.py and `base`, a run of the same model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)
    (tmp_path / "train.py").write_text(SCRIPT)
    x = torch.randn(24, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    trainer = Trainer(model, epochs=2, batch_size=8, verbose=False, device="cpu", backend="single")
    history = trainer.fit(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()))
    Path(history.run_dir).rename("base")
    yield tmp_path
    leave_group()  # that of the script, whose backend is fsdp


def test_the_command_exports_the_model_of_the_script_with_the_weights_of_the_run(here, capsys):
    before = sys.argv, sys.path[:]
    run(["export", "base", "--format", "torch-export", "--script", "train.py"])

    line = capsys.readouterr().out
    assert "base/export/model.pt2: torch-export" in line and "step-00000006 (step 6), outputs differ by 0.0e+00" in line
    assert not (here / "went-on").exists() and (sys.argv, sys.path) == before
    expected = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    distributed.load_weights(expected, "base")
    inputs = torch.randn(3, 4)
    assert torch.equal(torch.export.load("base/export/model.pt2").module()(inputs), expected(inputs))


def test_the_command_writes_onnx(here, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    run(["export", "base", "--format", "onnx", "--script", "train.py"])

    expected = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    distributed.load_weights(expected, "base")
    session = onnxruntime.InferenceSession("base/export/model.onnx")
    inputs = torch.randn(3, 4)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    numpy.testing.assert_allclose(found, expected(inputs).detach(), rtol=1e-4, atol=1e-5)


def test_checkpoint_export_is_the_same_command(here, capsys):
    run(["export", "base", "one.safetensors"])
    run(["checkpoint", "export", "base", "two.safetensors"])
    assert (here / "one.safetensors").read_bytes() == (here / "two.safetensors").read_bytes()


def test_what_the_command_refuses(here, capsys):
    for words, arguments in {
        "format 'onnx' needs the model: add --script train.py": ["base", "--format", "onnx"],
        "are of another model: other shapes: 0.weight": [
            "base",
            "--format",
            "torch-export",
            "--script",
            "train.py",
            "a.pt2",
            "--",
            "7",
        ],
        "ended without a call of Trainer.fit": ["base", "--format", "torch-export", "--script", "empty.py"],
        "no file to write: name one after base/checkpoints": ["base/checkpoints"],
    }.items():
        (here / "empty.py").write_text("")
        with pytest.raises(distributed.DistributedError, match=words):
            run(["export", *arguments])


def test_a_format_is_tried_before_training(here, capsys):
    pytest.importorskip("onnxruntime")
    run(["export", "train.py", "--dry-run", "--format", "onnx", "--", "9"])
    assert "train.py: the format onnx can hold its model: outputs differ by" in capsys.readouterr().out
    (here / "train.py").write_text(BESSEL + SCRIPT.replace("torch.nn.Tanh()", "Bessel()"))
    with pytest.raises(ConfigError, match="cannot hold the operator prims"):
        run(["export", "train.py", "--dry-run", "--format", "onnx"])
    assert sorted(each.name for each in here.iterdir()) == ["base", "runs", "train.py"]


KERAS = """
import keras, numpy, sys
import distributed
from distributed import CheckpointError, Trainer

def made(seed, name="head"):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh", name="body"),
                             keras.layers.Dropout(0.5, name="drop"), keras.layers.Dense(2, name=name)])

x = numpy.random.default_rng(0).standard_normal((16, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = Trainer(made(1), backend=sys.argv[1], loss_fn=loss, epochs=1, batch_size=8, verbose=False, device="cpu")
if sys.argv[1] == "tensorflow":
    data = (x, y)
else:
    import torch
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
run = trainer.fit(data).run_dir
other = made(2)
loaded = distributed.load_weights(other, run)
assert loaded.fits and loaded.num_loaded == 4, loaded
for a, b in zip(other.get_weights(), trainer.model.get_weights()):
    assert (numpy.asarray(a) == numpy.asarray(b)).all()
renamed = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="body"), keras.layers.Dense(5, name="classes")])
try:
    distributed.load_weights(renamed, run)
except CheckpointError as error:
    assert "/classes/kernel, " in str(error) and "unexpected keys " in str(error), error
loaded = distributed.load_weights(renamed, run, strict=False)
ends = [sorted(name.partition("/")[2] for name in names) for names in (loaded.missing, loaded.unexpected)]
assert ends == [["classes/bias", "classes/kernel"], ["head/bias", "head/kernel"]], loaded
assert (numpy.asarray(renamed.get_weights()[0]) == numpy.asarray(trainer.model.get_weights()[0])).all()
if sys.argv[1] == "tensorflow":
    done = distributed.export(made(3), run, "saved", format="savedmodel", example=x)
    assert done.difference < 1e-6, done
    import tensorflow as tf
    program = tf.saved_model.load("saved")
    served = program.serve(x[:3])
    assert numpy.allclose(served, trainer.model(x[:3], training=False), atol=1e-6)
    assert done.takes_any_batch_size

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = keras.layers.Dense(2)
        def call(self, inputs):
            return self.body(inputs[0]) + self.body(inputs[1])

    class OneSize(keras.Model):
        def call(self, inputs):
            return keras.ops.reshape(inputs, (16, 2, 2))

    assert distributed.export(Two(), None, "two", format="savedmodel", example=(x, x)).difference < 1e-6
    assert not distributed.export(OneSize(), None, "size", format="savedmodel", example=x).takes_any_batch_size
    from distributed.backends._keras.saved_model import _compared
    try:
        _compared(tf.ones((2, 3)), tf.ones((4, 5)))
    except distributed.ConfigError as error:
        assert "the SavedModel returns [[4, 5]] for the example, and the model [[2, 3]]" in str(error), error
    else:
        raise AssertionError
print("all is well")
"""


@pytest.mark.parametrize("engine", ["tensorflow", pytest.param("torch", marks=pytest.mark.full)])
def test_keras_models(tmp_path, engine):
    pytest.importorskip("keras")
    (tmp_path / "job.py").write_text(KERAS)
    environ = {**os.environ, "KERAS_BACKEND": engine, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    name = "single" if engine == "torch" else engine
    done = subprocess.run(
        [sys.executable, "job.py", name],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and "all is well" in done.stdout, done.stderr[-3000:]


def test_words_after_two_dashes_are_arguments_of_the_script_and_no_others(here):
    run(["export", "base", "--format", "torch-export", "--script", "train.py", "--", "6"])
    assert (here / "base" / "export" / "model.pt2").exists()
    with pytest.raises(ConfigError, match="'6' is one word too many; arguments of the script follow after --"):
        run(["export", "base", "a.pt2", "6", "--format", "torch-export", "--script", "train.py"])
    with pytest.raises(ConfigError, match=r"nothing is written with --dry-run: drop a\.pt2"):
        run(["export", "train.py", "a.pt2", "--dry-run", "--format", "torch-export"])
    with pytest.raises(ConfigError, match="is not a format"):
        run(["export", "base", "--format", "nosuch"])


def test_force_never_deletes_a_directory_that_is_no_export(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    for path in ("thesis", "."):
        with pytest.raises(ConfigError, match="is a directory with files that no export writes"):
            check_format("huggingface", Path(path), force=True)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "export" / "model.safetensors").write_text("")
    check_format("huggingface", Path("export"), force=True)


BERT = """
import torch, transformers
from distributed import Trainer

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return {"input_ids": (torch.arange(5) * (i + 1)) % 20, "labels": torch.tensor(i % 3)}

def made():
    config = transformers.BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, num_labels=3)
    return transformers.BertForSequenceClassification(config)

Trainer(made, epochs=1, batch_size=4, learning_rate=0.01).fit(Tokens())
print("trained")
"""


@pytest.mark.full
def test_the_command_exports_a_model_of_transformers_with_the_weights_of_a_sharded_run(run_cli, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(BERT)
    of_run = ["train", "--script", "train.py", "--backend", "fsdp", "--nproc-per-node", 2, "--run-dir", "run"]
    done = run_cli(of_run, cwd=tmp_path, timeout=150)
    assert done.returncode == 0 and "trained" in done.stdout, done.output
    done = run_cli(["export", "run", "--format", "huggingface", "--script", "train.py"], cwd=tmp_path)
    assert done.returncode == 0 and "trained" not in done.stdout, done.output
    assert "huggingface" in done.stdout and "outputs differ by 0.0e+00" in done.stdout

    saved = tmp_path / "run" / "export" / "hugging_face"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    expected = transformers.BertForSequenceClassification(model.config).eval()
    distributed.load_weights(expected, tmp_path / "run")
    inputs = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(model(inputs).logits, expected(inputs).logits)


SERVED = """
import sys
import numpy, tensorflow as tf
import distributed
sys.argv = ["train.py", "only the model"]
from train import made, x
model = made(7)
distributed.load_weights(model, "run")
program = tf.saved_model.load("run/export/saved_model")
found = program.serve(x[:3])
assert found.shape == (3, 2) and numpy.allclose(found, model(x[:3], training=False), atol=1e-6), found
print("as the model")
"""
SAVED = (
    KERAS[: KERAS.index("loss = keras")]
    + """
if len(sys.argv) == 1:
    trainer = Trainer(made(1), epochs=1, batch_size=8, learning_rate=0.1)
    trainer.fit((x, y))
    print("trained")
"""
)


@pytest.mark.full
def test_the_command_exports_a_keras_model_as_a_saved_model(run_cli, run_python, tmp_path):
    needs_backend("tensorflow")
    (tmp_path / "train.py").write_text(SAVED)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    on_tensorflow = {"cwd": tmp_path, "env": {"KERAS_BACKEND": "tensorflow", **quiet}, "timeout": 150}
    for command in (
        ["train", "--script", "train.py", "--backend", "tensorflow", "--nproc-per-node", 2, "--run-dir", "run"],
        ["export", "run", "--format", "savedmodel", "--script", "train.py"],
    ):
        done = run_cli(command, cwd=tmp_path, env=quiet, timeout=150)  # both choose the engine of Keras
        assert done.returncode == 0 and ("trained" in done.stdout) is (command[0] == "train"), done.output
    assert "run/export/saved_model: savedmodel" in done.stdout and "outputs differ by" in done.stdout
    done = run_python(["-c", SERVED], **on_tensorflow)
    assert done.returncode == 0 and "as the model" in done.stdout, done.output
