"""Callbacks that the package ships: averages of weights, freezing, the summary of a model; and what hooks may do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset, TensorDataset

from distributed import Callback, Trainer, export, load_weights
from distributed.backends._torch.optim import use_fused_sgd
from distributed.callbacks import ExponentialMovingAverage, Freeze, ModelSummary, WeightAveraging
from distributed.callbacks.averaging import Averaging
from distributed.callbacks.model_summary import summary
from distributed.checkpoints.shards import read_weights
from distributed.checkpoints.state_file import identity, read_state, write_state
from distributed.cli.__main__ import run
from distributed.errors import CheckpointError, ConfigError, TrainingError
from distributed.state import TrainState
from tests.unit.contexts import a_context

Weights = list[torch.Tensor]
BASE: dict[str, Any] = {
    "epochs": 3, "global_batch_size": 16, "dtype": "float64", "verbose": False, "device": "cpu", "shuffle": False,
}  # fmt: skip
UPDATES, PER_EPOCH, CUT = 12, 4, 7


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2)
        ).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Weighed(Callback):
    """Record the trained weights after each update."""

    def __init__(self) -> None:
        self.seen: list[Weights] = []

    def on_step_end(self, state: Any, result: Any) -> None:
        self.seen.append(weights(self.context.model))


def weights(model: torch.nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: Weights, other: Weights, apart: float = 0.0) -> bool:
    return all(float((a - b).abs().max()) <= apart for a, b in zip(one, other, strict=True))


def trained(*callbacks: Callback, val: Any = None, **settings: Any) -> Trainer:
    trainer = Trainer(net, callbacks=list(callbacks), **{"optimizer": sgd, **BASE, **settings})
    trainer.fit(data(), data() if val is None else val)
    return trainer


def checkpoint_of(trainer: Trainer, step: int) -> Path:
    assert trainer.history is not None
    return Path(trainer.history.run_dir) / "checkpoints" / f"step-{step:08d}"


# ------------------------------------------------------------------ averages


def exponential(seen: list[Weights], decay: Callable[[int], float], every: int = 1) -> Weights:
    average = weights(net())
    for number, now in enumerate(seen[every - 1 :: every], 1):
        rate = decay(number)
        average = [rate * mean + (1 - rate) * weight for mean, weight in zip(average, now, strict=True)]
    return average


@pytest.mark.parametrize(
    ("arguments", "decay", "every"),
    [
        ({"decay": 0.9}, lambda number: 0.9, 1),
        ({"decay": 0.3, "every_n_steps": 5}, lambda number: 0.3, 5),
        ({"decay": 0.5, "warmup": True}, lambda number: min(0.5, (1 + number) / (10 + number)), 1),
    ],
)
def test_the_exponential_average_is_that_of_its_formula_and_training_is_as_without_it(
    arguments: dict[str, Any], decay: Callable[[int], float], every: int
) -> None:
    alone, beside = Weighed(), Weighed()
    trained(alone)
    averaged = trained(beside, ExponentialMovingAverage(**arguments))
    assert all(same(one, other) for one, other in zip(alone.seen, beside.seen, strict=True)) and len(alone.seen) == 12
    assert same(weights(averaged.model), exponential(alone.seen, decay, every), 1e-12)


@pytest.mark.parametrize(
    ("arguments", "counted", "settings"),
    [
        ({}, [11], {}),
        ({"start_epoch": 1}, [7, 11], {}),
        ({"start_epoch": 2, "every_n_steps": 2}, [9, 11], {}),
        ({}, [11], {"max_steps": 12, "epochs": 1 << 30}),
        ({}, [7], {"max_steps": 10}),
        ({"every_n_steps": 1}, [7, 8, 9], {"max_steps": 10}),
    ],
)
def test_weight_averaging_counts_its_updates_alike(
    arguments: dict[str, Any], counted: list[int], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Weighed()
    trained(alone, **settings)
    mean = [torch.stack([alone.seen[i][k] for i in counted]).mean(0) for k in range(len(alone.seen[0]))]
    capsys.readouterr()
    averaged = trained(WeightAveraging(**arguments), **settings, **({"verbose": True} if settings else {}))
    assert same(weights(averaged.model), mean, 1e-12)
    if settings:
        shown = capsys.readouterr().out
        assert ("epoch 1  accuracy" in shown) is (settings.get("epochs") == 1 << 30) and str(1 << 30) not in shown


def test_validation_the_best_checkpoint_and_what_is_read_after_training_are_of_the_average() -> None:
    plain, averaged = trained(), trained(ExponentialMovingAverage(0.9))
    assert plain.history is not None and averaged.history is not None
    assert [row["loss"] for row in plain.history.rows] == [row["loss"] for row in averaged.history.rows]
    assert plain.history.rows[-1]["val_loss"] != averaged.history.rows[-1]["val_loss"]
    assert averaged.evaluate(data())["loss"] == pytest.approx(averaged.history.rows[-1]["val_loss"], abs=1e-12)
    checkpoint = checkpoint_of(averaged, UPDATES)
    stored = {raw.name: torch.frombuffer(bytearray(raw.read()), dtype=torch.float64) for raw in read_weights(checkpoint)
              if raw.dtype == "F64"}  # fmt: skip
    for name, parameter in averaged.model.named_parameters():
        assert torch.equal(stored[name], parameter.detach().reshape(-1))
    taken = averaged._fits.backend.take_weights(net, checkpoint)
    assert same(weights(taken), weights(averaged.model))


def test_exports_and_runs_that_start_from_the_weights_get_the_average(tmp_path: Path) -> None:
    seen = Weighed()
    averaged = trained(seen, ExponentialMovingAverage(0.9))
    average = weights(averaged.model)
    assert averaged.history is not None and not same(average, seen.seen[-1])
    run_dir = averaged.history.run_dir

    run(["export", str(run_dir), "weights.safetensors"])
    stored = load_file(tmp_path / "weights.safetensors")
    assert same([stored[name] for name, _ in averaged.model.named_parameters()], average)

    exported, loaded = net(), net()
    export(exported, run_dir, tmp_path / "net.pt2", format="torch-export", example=data()[:8][0])
    program = torch.export.load(tmp_path / "net.pt2")
    assert same([program.state_dict[name].detach() for name, _ in averaged.model.named_parameters()], average)
    load_weights(loaded, run_dir)
    assert same(weights(loaded), average)

    class AtStart(Callback):
        def on_train_start(self, state: Any) -> None:
            self.seen = weights(self.context.model)

    start = AtStart()
    trained(start, init_from=str(run_dir), max_steps=1)
    assert same(start.seen, average)


@pytest.mark.parametrize("make", [lambda: ExponentialMovingAverage(0.8), lambda: WeightAveraging(0, every_n_steps=3)])
@pytest.mark.parametrize("cut", [1, CUT, PER_EPOCH])
def test_a_run_with_an_average_that_was_cut_off_goes_on_bit_for_bit(make: Callable[[], Averaging], cut: int) -> None:
    whole, first, again = Weighed(), Weighed(), Weighed()
    one = trained(whole, make())
    cut_off = trained(first, make(), max_steps=cut)
    other = trained(again, make(), resume_from_checkpoint=str(checkpoint_of(cut_off, cut)))
    assert all(same(a, b) for a, b in zip(whole.seen[cut:], again.seen, strict=True))
    assert same(weights(one.model), weights(other.model))
    assert one.history is not None and other.history is not None
    assert [row["val_loss"] for row in one.history.rows] == [row["val_loss"] for row in other.history.rows]


def test_a_further_fit_goes_on_with_the_trained_weights_and_a_save_between_holds_both(tmp_path: Path) -> None:
    whole, parts = Weighed(), Weighed()
    trained(whole, ExponentialMovingAverage(0.8))
    trainer = Trainer(net, callbacks=[parts, ExponentialMovingAverage(0.8)], **{"optimizer": sgd, **BASE, "epochs": 1})
    trainer.fit(data(), data())
    average = weights(trainer.model)
    saved = trainer.save(tmp_path / "between")
    assert same(weights(trainer.model), average) and not same(average, parts.seen[-1])
    trainer.fit(data(), data(), epochs=2)
    assert all(same(one, other) for one, other in zip(whole.seen, parts.seen, strict=True))
    again = Weighed()
    resumed = trained(again, ExponentialMovingAverage(0.8), resume_from_checkpoint=str(saved))
    assert all(same(one, other) for one, other in zip(whole.seen[PER_EPOCH:], again.seen, strict=True))
    assert same(weights(resumed.model), weights(trainer.model))


def test_before_the_average_begins_there_is_none_and_an_old_one_does_not_come_back() -> None:
    trainer = trained(WeightAveraging(2), max_steps=CUT)
    assert not (checkpoint_of(trainer, CUT) / "averaged").exists()
    first = trained(ExponentialMovingAverage(0.8), max_steps=CUT)
    assert (checkpoint_of(first, CUT) / "averaged").is_dir()
    without = trained(resume_from_checkpoint=str(checkpoint_of(first, CUT)))
    assert not (checkpoint_of(without, UPDATES) / "averaged").exists()
    assert same(weights(without.model), weights(trained().model))


def test_a_fit_after_an_error_in_a_validation_starts_from_the_trained_weights() -> None:
    class Fails(Callback):
        def __init__(self) -> None:
            self.at_start: list[Weights] = []

        def on_train_start(self, state: Any) -> None:
            self.at_start.append(weights(self.context.model))

        def on_validation_start(self, state: Any) -> None:
            if len(self.at_start) == 1:
                raise TrainingError("it fails")

    seen, fails = Weighed(), Fails()
    trainer = Trainer(net, callbacks=[seen, ExponentialMovingAverage(0.8), fails], optimizer=sgd, **BASE)
    with pytest.raises(TrainingError, match="it fails"):
        trainer.fit(data(), data())
    last = seen.seen[-1]
    assert not same(weights(trainer.model), last)
    trainer.fit(data(), data())
    assert same(fails.at_start[1], last)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from data()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExponentialMovingAverage(1.0), r"decay=1.0 must be between 0 and 1"),
        (lambda: ExponentialMovingAverage(every_n_steps=0), "every_n_steps=0 must be 1 or more"),
        (lambda: WeightAveraging(-1), "start_epoch=-1 must be 0 or more"),
        (
            lambda: trained(WeightAveraging(), max_steps=3),
            "max_steps=3 ends training before the first epoch of 4 updates",
        ),
        (lambda: trained(WeightAveraging(3)), r"WeightAveraging\(start_epoch=3\) averages nothing in 3 epochs"),
        (
            lambda: Trainer(net, callbacks=[WeightAveraging()], optimizer=sgd, **BASE, max_steps=9).fit(Endless()),
            "averages at the end of epochs, and the length of a stream is not known: set every_n_steps",
        ),
        (
            lambda: trained(ExponentialMovingAverage(), WeightAveraging()),
            "ExponentialMovingAverage and WeightAveraging both average the weights, but a run keeps one average only: drop one",
        ),
        (lambda: Freeze(), r"Freeze\(\) freezes nothing: give the starts of the names"),
        (lambda: Freeze([]), r"Freeze\(\) freezes nothing: give the starts of the names"),
        (lambda: Freeze("0.", 3), r"Freeze\(3\) is no start of a name: give texts, such as Freeze\('encoder.'\)"),
        (lambda: trained(Freeze(["4."])), r"Freeze\('4.'\): no parameter's name starts with this"),
        (lambda: Freeze("0.", until_epoch=1, until_step=2), "until_epoch=1 and until_step=2 both end Freeze: drop one"),
        (lambda: trained(Freeze("4.")), r"Freeze\('4.'\): no parameter's name starts with this"),
        (lambda: trained(Freeze("")), "Freeze leaves no parameter to train: name fewer"),
        (lambda: ModelSummary(-1), "depth=-1 must be 0 or more"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ------------------------------------------------------------------ freezing, and the hook before an update


@pytest.mark.parametrize(
    ("arguments", "first"), [({"until_epoch": 1}, PER_EPOCH), ({"until_step": 6}, 6), ({}, UPDATES)]
)
@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 0.1}, {"optimizer": "adamw", "weight_decay": 0.5}])
def test_frozen_parameters_do_not_change_until_their_time_and_the_others_train_as_if_they_were_constants(
    arguments: dict[str, int], first: int, settings: dict[str, Any]
) -> None:
    seen = Weighed()
    trained(seen, Freeze("0.", **arguments), **settings)
    begin = weights(net())
    changed = [not same(each[:2], begin[:2]) for each in seen.seen]
    assert changed == [False] * first + [True] * (UPDATES - first)

    class Constant(Weighed):
        def on_train_start(self, state: Any) -> None:
            for parameter in list(self.context.model.parameters())[:2]:
                assert not parameter.requires_grad

    def constant() -> torch.nn.Module:
        model = net()
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad = False
        return model

    beside = Constant()
    Trainer(constant, callbacks=[beside], **{"optimizer": sgd, **BASE, **settings}).fit(data(), data())
    assert all(same(one, other) for one, other in zip(seen.seen[:first], beside.seen[:first], strict=True))


@pytest.mark.parametrize("cut", [2, PER_EPOCH, CUT])
def test_a_run_with_frozen_parameters_that_was_cut_off_goes_on_bit_for_bit(cut: int) -> None:
    whole, again = Weighed(), Weighed()
    trained(whole, Freeze("0.", until_step=5))
    cut_off = trained(Freeze("0.", until_step=5), max_steps=cut)
    trained(again, Freeze("0.", until_step=5), resume_from_checkpoint=str(checkpoint_of(cut_off, cut)))
    assert all(same(one, other) for one, other in zip(whole.seen[cut:], again.seen, strict=True))


def test_the_fused_kernel_takes_a_gradient_that_comes_late() -> None:
    def stepped(is_fused: bool) -> Weights:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        if is_fused:
            use_fused_sgd(optimizer, model)
            assert optimizer.param_groups[0]["fused"]
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if step < number:
                    parameter.grad = None
            optimizer.step()
        return weights(model)

    assert same(stepped(True), stepped(False), 1e-14)


def test_the_hook_before_an_update_sees_the_gradients_that_the_update_uses() -> None:
    class Halves(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_before_update(self, state: Any) -> None:
            self.steps.append(state.step)
            for parameter in self.context.model.parameters():
                parameter.grad.mul_(0.5)

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2)

    def half(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    hooked = Halves()
    assert same(weights(trained(hooked, optimizer=plain).model), weights(trained(optimizer=half).model), 1e-12)
    assert hooked.steps == list(range(UPDATES))


def test_a_backend_without_gradients_or_averages_refuses_before_training() -> None:
    class Hooked(Callback):
        def on_before_update(self, state: Any) -> None: ...

    for callback, need in ((Hooked(), "gradients in hooks"), (ExponentialMovingAverage(), "averaged weights")):
        name = type(callback).__name__
        with pytest.raises(
            ConfigError,
            match=f"{name} needs {need}, which backend='deepspeed' does not have with zero_stage above 0: ZeRO keeps",
        ):
            Trainer(net, callbacks=[callback], backend="deepspeed", deepspeed={"zero_stage": 2}, device="cpu")


# ------------------------------------------------------------------ what a hook may do


def test_a_hook_evaluates_and_changes_no_number_of_training() -> None:
    class Evaluates(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step_end(self, state: Any, result: Any) -> None:
            self.losses.append(self.context.evaluate(data())["loss"])

    alone, beside, hook = Weighed(), Weighed(), Evaluates()
    one, other = trained(alone), trained(beside, hook)
    assert all(same(a, b) for a, b in zip(alone.seen, beside.seen, strict=True))
    assert one.history is not None and other.history is not None
    assert [row["val_loss"] for row in one.history.rows] == [row["val_loss"] for row in other.history.rows]
    assert hook.losses[PER_EPOCH - 1 :: PER_EPOCH] == pytest.approx(
        [row["val_loss"] for row in other.history.rows], abs=1e-12
    )


def test_a_hook_asks_for_a_checkpoint() -> None:
    class Saves(Callback):
        def __init__(self) -> None:
            self.saved: list[int] = []

        def on_step_end(self, state: Any, result: Any) -> None:
            if state.step in (2, 5):
                self.context.save()

        def on_checkpoint(self, state: Any, path: Path) -> None:
            self.saved.append(state.step)

    hook = Saves()
    trained(hook, checkpoint_frequency=None, keep_best=False)
    assert hook.saved == [2, 5, UPDATES]


def test_the_summary_shows_the_modules_and_the_numbers_of_parameters() -> None:
    shown: list[str] = []
    model = net()
    model[0].weight.requires_grad = False
    summary = ModelSummary()
    Callback._bind(summary, a_context(model=model, notice=shown.append))
    summary.on_train_start(TrainState())
    assert shown == [
        "0    Linear       54 parameters, 48 of them frozen",
        "1    BatchNorm1d  12 parameters",
        "2    Dropout       0 parameters",
        "3    Linear       14 parameters",
        "all  Sequential   80 parameters, 48 of them frozen",
    ]
    shown.clear()
    summary.on_train_start(TrainState(step=3))
    assert shown == []  # a resumed run has shown it before


# ------------------------------------------------------------------ tensors in the state of a callback


VALUES = {
    "float64": torch.tensor([[1.5, -0.0]], dtype=torch.float64), "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]), "empty": torch.empty(0, 3), "scalar": torch.tensor(3), "int64": numpy.arange(4),
    "float16": numpy.ones((2, 2), numpy.float16), "transposed": torch.arange(6).reshape(2, 3).t(),
}  # fmt: skip


def test_tensors_and_arrays_in_a_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_state(tmp_path, TrainState(callbacks={"Mine": {"values": [VALUES, 1.5, ("text",)]}}), {})
    state, _ = read_state(tmp_path)
    found, *rest = state.callbacks["Mine"]["values"]
    assert rest == [1.5, ("text",)] and found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert (
            type(found[name]) is type(value) and found[name].dtype == value.dtype and found[name].shape == value.shape
        )
        assert bool((found[name] == value).all()), name
    (tmp_path / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        read_state(tmp_path)
    (tmp_path / "state.safetensors").unlink()
    with pytest.raises(CheckpointError):
        read_state(tmp_path)


def test_states_with_other_tensors_are_other_states() -> None:
    def of(value: Any) -> str:
        return identity(TrainState(callbacks={"Mine": {"value": value}}), None)

    assert of(torch.ones(2)) == of(torch.ones(2)) == of(numpy.ones(2, numpy.float32)) != of(torch.zeros(2))
    with pytest.raises(TrainingError, match="keep plain values, arrays and tensors in it"):
        of(object())


def test_a_callback_keeps_a_tensor_in_the_checkpoint() -> None:
    class Sums(Callback):
        def __init__(self) -> None:
            self.total = torch.zeros(2, 8)

        def on_step_end(self, state: Any, result: Any) -> None:
            self.total += state.step

        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total}

        def load_state_dict(self, state: Any) -> None:
            self.total = state["total"]

    whole, cut, again = Sums(), Sums(), Sums()
    trained(whole)
    first = trained(cut, max_steps=CUT)
    trained(again, resume_from_checkpoint=str(checkpoint_of(first, CUT)))
    assert torch.equal(whole.total, again.total) and float(whole.total[0, 0]) == sum(range(1, UPDATES + 1))


def test_the_summary_of_a_torch_model_with_layers_of_its_own() -> None:
    class Layered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    shown = summary(Layered(), 1)
    assert [line.split()[:3] for line in shown] == [["layers", "ModuleList", "6"], ["all", "Layered", "6"]]


def test_an_update_whose_frozen_gradients_overflow_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Overflows(Callback):
        """Make the gradients of the frozen layer infinite before they are unscaled."""

        def on_train_start(self, state: Any) -> None:
            self.context.model[0].weight.register_hook(lambda gradient: gradient * float("inf"))

    class Seen(Callback):
        def __init__(self) -> None:
            self.skipped: list[bool] = []

        def on_step_end(self, state: Any, result: Any) -> None:
            self.skipped.append(result.skipped)

    seen = Seen()
    settings = {"dtype": "float32", "mixed_precision": "fp16", "max_steps": 3}
    x = data().tensors[0].float()
    plain = TensorDataset(x, (x.sum(1) > 0).long())
    trainer = Trainer(
        lambda: net().float(), callbacks=[Overflows(), Freeze("0."), seen], optimizer=sgd, **{**BASE, **settings}
    )
    trainer.fit(plain)
    assert seen.skipped == [True] * 3
