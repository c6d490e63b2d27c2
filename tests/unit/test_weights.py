"""Weights by name: `load_weights` and the setting `init_from`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import distributed
from distributed import CheckpointError, ConfigError, Trainer
from distributed.checkpoints.store import read_state
from distributed.config.merging import Overrides, merge
from distributed.runs.history import History
from distributed.training.files import _Taken
from distributed.training.remote import take_up

BASE: dict[str, Any] = {"verbose": False, "device": "cpu", "shuffle": False, "batch_size": 8, "nproc_per_node": 1}


class Net(torch.nn.Module):
    def __init__(self, classes: int = 2, head: str = "head") -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh())
        self.add_module(head, torch.nn.Linear(6, classes))
        self._head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.get_submodule(self._head)(self.body(x))
        return found


def net(seed: int = 0, **arguments: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**arguments)


def data() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


@pytest.fixture(autouse=True)
def first_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each fit of a test the run directory of a process that begins."""
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs whose second checkpoint is the best by its monitor."""
    directory = tmp_path_factory.mktemp("run")
    values = iter([0.2, 0.9, 0.5])
    now = [0.0]

    def score(outputs: Any, targets: Any) -> Any:
        return torch.tensor(now[-1])

    class Next(distributed.Callback):
        def on_validation_start(self, state: Any) -> None:
            now.append(next(values))

    settings = {**BASE, "epochs": 3, "monitor": "val_score", "monitor_mode": "max", "max_validation_batches": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        trainer = Trainer(net, metrics={"score": score}, callbacks=[Next()], **settings)
        history = trainer.fit(data(), data())
    return directory / history.run_dir


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model" / "model.safetensors")


def same_values(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return same_values(model.state_dict(), state)


def test_of_a_run_the_best_checkpoint_is_loaded_and_named(run):
    first, second, third = checkpoints(run)

    for source in (run, run / "checkpoints", str(run)):
        model = net(seed=7)
        loaded = distributed.load_weights(model, source)
        assert loaded.source == second and loaded.fits
        assert same(model, state_of(second))
    assert not same(model, state_of(first)) and not same(model, state_of(third))


def test_without_a_value_of_the_monitor_the_newest_checkpoint_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = Trainer(net, epochs=2, **BASE).fit(data())

    loaded = distributed.load_weights(net(seed=7), history.run_dir)

    assert loaded.source == checkpoints(tmp_path / history.run_dir)[-1]


def test_a_checkpoint_and_a_file_and_a_wrapped_model(run, tmp_path):
    first = checkpoints(run)[0]
    wrapped = torch.nn.DataParallel(net(seed=7))
    assert distributed.load_weights(wrapped, first).num_loaded == len(state_of(first))
    assert same(wrapped.module, state_of(first))

    save_file(net(seed=3).state_dict(), tmp_path / "here.safetensors")
    model = net(seed=7)
    assert distributed.load_weights(model, str(tmp_path / "here.safetensors")).source == tmp_path / "here.safetensors"
    assert same(model, net(seed=3).state_dict())


def test_a_directory_of_files_as_the_hub_has_them(tmp_path):
    state = net(seed=3).state_dict()
    names = sorted(state)
    save_file({name: state[name] for name in names[:3]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[3:]}, tmp_path / "model-00002-of-00002.safetensors")
    model = net(seed=7)

    distributed.load_weights(model, tmp_path)

    assert same(model, state)


def test_a_tied_name_that_the_file_leaves_out_is_not_missing(tmp_path):
    def tied() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "out": torch.nn.Linear(3, 5, bias=False)})
        model["out"].weight = model["embed"].weight
        return model

    save_file({"embed.weight": torch.ones(5, 3)}, tmp_path / "tied.safetensors")
    model = tied()

    assert distributed.load_weights(model, tmp_path / "tied.safetensors").fits
    assert torch.equal(model["out"].weight, torch.ones(5, 3))


def test_mismatches_are_listed_and_nothing_changes(run):
    other = net(seed=7, classes=5, head="classifier")
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        distributed.load_weights(other, run)
    assert "missing keys classifier.weight, classifier.bias; unexpected keys head.bias, head.weight" in str(error.value)
    assert same(other, before)

    wider = net(seed=7, classes=5)
    with pytest.raises(CheckpointError, match=r"other shapes: head.weight is \[2, 6\] there, \[5, 6\] here"):
        distributed.load_weights(wider, run)


def test_without_strict_what_fits_is_loaded_and_the_rest_is_returned(run):
    wider = net(seed=7, classes=5)
    head = wider.head.weight.clone()

    loaded = distributed.load_weights(wider, checkpoints(run)[0], strict=False)

    assert set(loaded.other_shapes) == {"head.weight", "head.bias"} and not loaded.fits
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert torch.equal(wider.head.weight, head)
    assert torch.equal(wider.body[0].weight, state_of(checkpoints(run)[0])["body.0.weight"])


def test_nothing_that_fits_is_an_error_without_strict_too(run):
    with pytest.raises(CheckpointError, match="are of another model"):
        distributed.load_weights(torch.nn.Bilinear(2, 2, 2), run, strict=False)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


@pytest.mark.parametrize("name", ["weights.pt", "pytorch_model.bin"])
def test_no_pickle_is_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match="is a pickle, which can run code when it is read"):
            distributed.load_weights(net(), source)
    assert not (tmp_path / "ran").exists()


def test_wrong_sources_and_models_are_one_line(tmp_path, run):
    for source, words in {
        "nowhere": "there is no nowhere", str(tmp_path): "holds no checkpoint", "s3://bucket/run": "copy it to this machine",
    }.items():  # fmt: skip
        with pytest.raises((CheckpointError, ConfigError), match=words) as error:
            distributed.load_weights(net(), source)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="pass a torch module or a Keras model, not a factory"):
        distributed.load_weights(net, run)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ConfigError, match="is on the meta device"):
        distributed.load_weights(empty, run)


def test_a_damaged_checkpoint_is_refused(tmp_path, run):
    shutil.copytree(run, tmp_path / "copy")
    best = distributed.load_weights(net(), run).source.name
    file = tmp_path / "copy" / "checkpoints" / best / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="digest differs"):
        distributed.load_weights(net(), tmp_path / "copy")


# ------------------------------------------------------------------ init_from


class AtStart(distributed.Callback):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_start(self, state: Any) -> None:
        self.step = state.step
        self.weights = {name: tensor.clone() for name, tensor in self.context.model.state_dict().items()}


def fit(model: Any = net, **settings: Any) -> tuple[AtStart, Any]:
    seen = AtStart()
    history = Trainer(model, callbacks=[seen], **{**BASE, **settings}).fit(data())
    return seen, history


def test_a_run_starts_from_the_weights_alone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = checkpoints(run)[1]

    for model in (net, net(seed=9)):
        seen, history = fit(model, init_from=str(source))
        assert seen.step == 0 and history.steps == 4
        assert same_values(seen.weights, state_of(source))
    assert f"init_from: {source}  # code" in (tmp_path / history.run_dir / "config.yaml").read_text()
    manifest = json.loads((checkpoints(tmp_path / history.run_dir)[-1] / "manifest.json").read_text())
    assert "init_from" not in manifest["config"]


def test_a_resumed_run_does_not_load_them_again(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "base")
    fit(init_from="base", checkpoint_dir="kept", max_steps=2)
    shutil.rmtree(tmp_path / "base")  # a resumed run does not need it
    newest = sorted((tmp_path / "kept").glob("step-*"))[-1]
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)
    shutil.copytree("kept", "again")  # this process keeps the lock of the first

    seen, history = fit(init_from="base", resume_from_checkpoint=True, checkpoint_dir="again", max_steps=3)

    assert seen.step == 2 and history.steps == 3
    assert same_values(seen.weights, state_of(newest))


def test_a_second_fit_and_an_evaluation_use_the_weights_once(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = AtStart()
    trainer = Trainer(net, callbacks=[seen], init_from=str(run), **BASE)
    reference = net(seed=7)
    distributed.load_weights(reference, run)

    predicted = trainer.predict(data())
    batches = data().tensors[0].split(BASE["batch_size"])  # a batch of another size may round in another way
    assert torch.equal(predicted, torch.cat([reference.eval()(batch) for batch in batches]))
    trainer.fit(data())
    assert same_values(seen.weights, reference.state_dict())
    trained = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.fit(data())
    assert seen.step == 4 and same_values(seen.weights, trained)


def test_what_does_not_fit_is_listed_before_the_first_step(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen, _ = fit(lambda: net(seed=7, classes=5), init_from=str(run), verbose=True)
    text = capsys.readouterr()
    lines = " ".join((text.out + text.err).split())
    assert "starts from the weights of" in lines
    assert "head.weight is [2, 6] there, [5, 6] here" in lines
    assert torch.equal(seen.weights["body.0.weight"], state_of(checkpoints(run)[1])["body.0.weight"])
    with pytest.raises(CheckpointError, match=r"^init_from='.*': the weights of .* are of another model"):
        fit(torch.nn.Bilinear(2, 2, 2), init_from=str(run))


def test_float64_weights_keep_their_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wide = {
        name: tensor / 3 if tensor.is_floating_point() else tensor
        for name, tensor in net().double().state_dict().items()
    }
    save_file(wide, "wide.safetensors")
    seen, _ = fit(init_from="wide.safetensors", dtype="float64")
    assert same_values(seen.weights, wide)


def test_wrong_sources_are_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "short.safetensors").write_bytes(b"short")
    for source, words in {
        "gone": "init_from='gone': there is no gone",
        "weights.pt": "init_from='weights.pt': weights.pt is a pickle",
        "short.safetensors": "init_from='short.safetensors': short.safetensors is not a safetensors file",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{words}"):
            Trainer(net, init_from=source, **BASE)
    assert not (tmp_path / "ran").exists()


def test_weights_and_a_state_to_resume_contradict_each_other():
    both = {"init_from": "a", "resume_from_checkpoint": "b"}
    for overrides, code in ((Overrides(), both), (Overrides(flag={"init_from": "a"}), {"resume_from_checkpoint": "b"})):
        with pytest.raises(
            ConfigError, match="init_from='a' gives the weights only, and resume_from_checkpoint='b' the whole"
        ):
            merge(overrides, code)
    merge(Overrides(flag={"resume_from_checkpoint": "b"}), {"init_from": "a"})  # a stronger source
    merge(Overrides(), {**both, "resume_from_checkpoint": True})


def test_tensors_in_the_state_of_a_callback_are_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(distributed.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"kept": torch.arange(3.0)}

    monkeypatch.chdir(tmp_path)
    trainer = Trainer(net(), callbacks=[Keeps()], epochs=1, **BASE)
    run_dir = trainer.fit(data()).run_dir
    again = net(seed=1)
    assert distributed.load_weights(again, run_dir).fits
    assert torch.equal(again.head.weight, trainer.model.head.weight)
    other = torch.nn.ParameterList([torch.zeros(3)])
    with pytest.raises(CheckpointError, match="are of another model"):
        distributed.load_weights(other, run_dir)


def test_a_trainer_that_takes_up_a_checkpoint_does_not_go_back_to_init_from(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best trial of a sweep comes back in this way, also if its function trains with `init_from`."""
    monkeypatch.chdir(tmp_path)
    newest = checkpoints(run)[-1]
    state, _ = read_state(newest)
    trainer = Trainer(net, init_from=str(checkpoints(run)[0]), **BASE)
    expected = Trainer(net, **BASE, init_from=str(newest)).evaluate(data())

    take_up(trainer._fits, newest, state, History.of(state, str(run), state.total_time))

    assert (
        trainer.evaluate(data())
        == expected
        != Trainer(net, init_from=str(checkpoints(run)[0]), **BASE).evaluate(data())
    )
    assert trainer.history is not None and trainer.history.steps == state.step
