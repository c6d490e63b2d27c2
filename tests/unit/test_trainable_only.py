"""`checkpoint_trainable_only`: checkpoints without the frozen parameters, and what reads them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import distributed
from distributed import Callback, CheckpointError, ConfigError, Trainer, TrainingError
from distributed.backends._torch.frozen import FrozenPart, stored_record
from distributed.callbacks import ExponentialMovingAverage, Freeze
from distributed.checkpoints.manifest import list_checkpoints, manifest_of
from distributed.checkpoints.state_file import read_state
from distributed.checkpoints.verifying import verify
from distributed.cli.checkpoint import list_, verify_
from distributed.cli.export import export
from distributed.training.files import _Taken

BASE: dict[str, Any] = {
    "verbose": False, "device": "cpu", "batch_size": 8, "nproc_per_node": 1, "epochs": 4, "optimizer": "adamw",
}  # fmt: skip
ONLY = {**BASE, "checkpoint_trainable_only": True}
FROZEN = {"base.weight", "base.bias", "norm.weight", "norm.bias"}


class Adapted(torch.nn.Module):
    """A frozen base with a tied name and a BatchNorm whose statistics change, and a small trained adapter."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.base, self.norm = torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width)
        self.tied = self.base
        for part in (self.base, self.norm):
            part.requires_grad_(False)
        self.adapter = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.adapter(torch.nn.functional.dropout(self.norm(self.base(x)), 0.1, self.training))
        return found


def net(seed: int = 0, **arguments: Any) -> Adapted:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Adapted(**arguments)


def data() -> TensorDataset:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


@pytest.fixture(autouse=True)
def first_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each fit of a test a run directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)


@dataclasses.dataclass
class Run:
    trainer: Trainer
    path: Path

    @property
    def model(self) -> Any:
        return self.trainer.model


def trained(model: Any = net, *callbacks: Callback, **settings: Any) -> Run:
    trainer = Trainer(model, callbacks=list(callbacks), **{**ONLY, **settings})
    return Run(trainer, Path(trainer.fit(data()).run_dir).absolute())


def checkpoints(run: Run) -> list[Path]:
    return [info.path for info in list_checkpoints(run.path / "checkpoints")]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Return (the checkpoint after 2 of 4 epochs, the last one, the final weights) of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("made"))
        run = trained()
        second, _, last = checkpoints(run)
        return second, last, weights(run.model)


def test_a_checkpoint_has_the_trained_parameters_and_all_buffers_and_records_the_others(made: Any) -> None:
    _, last, final = made
    stored = load_file(last / "model" / "model.safetensors")
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert stored.keys() == buffers | {"adapter.weight", "adapter.bias"}
    assert all(torch.equal(value, final[name]) for name, value in stored.items())
    record = read_state(last)[1]["frozen"]
    assert record.keys() == FROZEN | {"tied.weight", "tied.bias"}
    assert record["base.weight"]["shape"] == [256, 8] and record["base.weight"]["dtype"] == "float32"
    manifest = verify(last)
    assert manifest.is_trainable_only and manifest.frozen is not None
    assert manifest.frozen["tensors"] == len(record)
    whole = trained(checkpoint_trainable_only=False)
    sizes = [(path / "model" / "model.safetensors").stat().st_size for path in (last, checkpoints(whole)[-1])]
    assert sizes[1] - sizes[0] > 256 * 8 * 4  # at least the base
    assert not verify(checkpoints(whole)[-1]).is_trainable_only
    assert b'"frozen"' not in (checkpoints(whole)[-1] / "manifest.json").read_bytes()
    assert_same(weights(whole.model), final)  # the setting changes no number


def test_a_resumed_run_ends_in_the_same_bits(made: Any) -> None:
    second, last, final = made
    again = trained(resume_from_checkpoint=str(second))
    assert_same(weights(again.model), final)
    assert load_file(checkpoints(again)[-1] / "optimizer" / "optimizer.safetensors").keys()
    one, other = verify(checkpoints(again)[-1]), verify(last)
    assert one.frozen == other.frozen
    assert one.files["optimizer/optimizer.safetensors"] == other.files["optimizer/optimizer.safetensors"]


def changed(name: str, index: int = -1) -> Adapted:
    model = net()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[index] += 1
    return model


def thawed() -> Adapted:
    model = net()
    model.norm.requires_grad_(True)
    return model


def more_frozen() -> Adapted:
    model = net()
    model.adapter.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: net(1), "base.weight has other values here"),
        (lambda: changed("norm.bias"), "norm.bias has other values here"),
        (lambda: net(width=128), r"base.weight has the shape \[128, 8\] instead of \[256, 8\] here"),
        (thawed, "norm.weight is frozen in the checkpoint, but not here"),
        (more_frozen, "adapter.bias is frozen here, but not in the checkpoint"),
    ],
)
def test_other_frozen_parameters_are_refused_with_the_first_name(model: Any, message: str, made: Any) -> None:
    second, _, _ = made
    with pytest.raises(CheckpointError, match=f"{message}: construct the model with the frozen weights") as caught:
        trained(model, resume_from_checkpoint=str(second))
    assert "\n" not in str(caught.value)


def test_another_element_type_of_a_frozen_parameter_is_refused() -> None:
    def double() -> Adapted:
        model = net()
        model.norm.bias.data = model.norm.bias.data.double()
        return model

    stored = FrozenPart(net(), is_main=True).record
    with pytest.raises(CheckpointError, match=r"norm.bias has the element type float64 instead of float32 here"):
        FrozenPart(double(), is_main=True).check(stored, Path("step-00000001"))


def test_whole_and_partial_checkpoints_need_the_setting_that_fits(made: Any) -> None:
    second, _, final = made
    with pytest.raises(
        CheckpointError, match="trainable parameters only: set checkpoint_trainable_only=True to resume"
    ):
        trained(resume_from_checkpoint=str(second), checkpoint_trainable_only=False)
    whole = trained(checkpoint_trainable_only=False, epochs=2)
    again = trained(resume_from_checkpoint=str(checkpoints(whole)[-1]))
    assert_same(weights(again.model), final)
    assert verify(checkpoints(again)[-1]).is_trainable_only
    with pytest.raises(CheckpointError, match=r"the frozen parameter norm.bias has other values in the checkpoint"):
        trained(lambda: changed("norm.bias"), resume_from_checkpoint=str(checkpoints(whole)[-1]))


def test_load_weights_and_init_from_say_what_is_missing(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, last, final = made
    model = net()
    with pytest.raises(
        CheckpointError, match=r"missing keys base.weight, base.bias, .*trainable parameters only: pass strict=False"
    ):
        distributed.load_weights(model, last)
    loaded = distributed.load_weights(model, last, strict=False)
    assert loaded.is_trainable_only and set(loaded.missing) == FROZEN | {"tied.weight", "tied.bias"}
    assert_same(weights(model), final)
    trained(init_from=str(last), verbose=True, epochs=1)
    assert "it has the trainable parameters only" in capsys.readouterr().err.replace("\n", " ")


def test_the_commands_say_that_a_checkpoint_is_partial(
    made: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, last, _ = made
    verify_(last)
    list_(last.parent)
    output = capsys.readouterr().out
    assert ", trainable parameters only, all verified" in output
    assert "(trainable only)" in output
    with pytest.raises(
        ConfigError, match=r"trainable parameters only: add --script train.py, whose model has the frozen"
    ):
        export(last, tmp_path / "out.safetensors")


def test_a_model_with_its_frozen_part_is_exported_whole(made: Any, tmp_path: Path) -> None:
    from distributed.backends.exporting import export as export_model

    _, last, final = made
    export_model(net(), last, tmp_path / "out.safetensors", format="safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), final)
    with pytest.raises(CheckpointError, match=r"base.weight has other values here"):
        export_model(net(1), last, tmp_path / "other.safetensors", format="safetensors")


def test_the_trainer_saves_the_whole_model(tmp_path: Path, made: Any) -> None:
    run = trained()
    run.trainer.save(tmp_path / "model.safetensors")
    assert_same(load_file(tmp_path / "model.safetensors"), made[2])


def test_averaged_weights_leave_the_frozen_ones_out_too(made: Any) -> None:
    whole = trained(net, ExponentialMovingAverage(0.9))
    cut = checkpoints(whole)[-2]
    averaged = load_file(cut / "averaged" / "model" / "model.safetensors")
    assert "adapter.weight" in averaged and not FROZEN & averaged.keys()
    again = trained(net, ExponentialMovingAverage(0.9), resume_from_checkpoint=str(cut))
    assert_same(weights(again.model), weights(whole.model))
    model = net()
    distributed.load_weights(model, checkpoints(whole)[-1], strict=False)
    assert_same(weights(model), weights(whole.model))


def test_a_further_fit_records_the_values_that_it_starts_with() -> None:
    run = trained(net(), epochs=1)
    first = read_state(checkpoints(run)[-1])[1]["frozen"]
    with torch.no_grad():
        run.model.norm.bias.add_(1)
    further = Run(run.trainer, Path(run.trainer.fit(data()).run_dir))
    second = read_state(checkpoints(further)[-1])[1]["frozen"]
    assert [name for name in first if first[name] != second[name]] == ["norm.bias"]


def test_a_parameter_that_is_unfrozen_during_the_fit_stops_it() -> None:
    class Unfreezes(Callback):
        def on_train_start(self, state: Any) -> None:
            self.context.model.norm.bias.requires_grad_(True)

    with pytest.raises(
        TrainingError, match=r"leaves out norm.bias, which was frozen at the start of the fit and is trained"
    ):
        trained(net, Unfreezes())


def test_what_contradicts_is_refused_in_one_line() -> None:
    for arguments in ({"until_epoch": 1}, {"until_step": 3}):
        with pytest.raises(ConfigError, match="checkpoint_trainable_only=True does not work with Freeze, which begins"):
            Trainer(net, callbacks=[Freeze("adapter", **arguments)], **ONLY)
    with pytest.raises(
        ConfigError, match="checkpoint_trainable_only=True does not work with backend='deepspeed' with native"
    ):
        Trainer(net, backend="deepspeed", deepspeed={"native_checkpoint": True, "zero_stage": 1}, **ONLY)
    with pytest.raises(ConfigError, match=r"mlflow_register_model='x' registers .*: drop one of them"):
        Trainer(net, mlflow_tracking=True, mlflow_register_model="x", **ONLY)


def test_a_model_without_frozen_parameters_has_whole_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(torch.nn.Linear(8, 2), epochs=1, verbose=True)
    assert not verify(checkpoints(run)[-1]).is_trainable_only
    assert "no parameter is frozen, so checkpoints have the whole model" in capsys.readouterr().out.replace("\n", " ")
    distributed.load_weights(torch.nn.Linear(8, 2), checkpoints(run)[-1])


def test_a_damaged_record_is_refused(made: Any) -> None:
    raw = (made[1] / "manifest.json").read_bytes()
    assert manifest_of(made[1], raw).frozen is not None
    with pytest.raises(CheckpointError, match="its record of the frozen parameters is damaged"):
        stored_record(["base.weight"], made[1])


def test_frozen_weights_that_come_from_init_from_are_read_again_on_resume(made: Any, tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    save_file({name: value for name, value in weights(net()).items() if not name.startswith("tied")}, base)
    run = trained(lambda: net(1), init_from=str(base))
    assert_same(weights(run.model), made[2])
    cut = checkpoints(run)[0]
    again = trained(lambda: net(1), init_from=str(base), resume_from_checkpoint=str(cut))
    assert_same(weights(again.model), made[2])
    with pytest.raises(CheckpointError, match=r"base.weight has other values here: .* \(or give them as init_from\)"):
        trained(lambda: net(1), resume_from_checkpoint=str(cut))
