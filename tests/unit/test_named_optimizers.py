"""Optimizers and schedules that settings name: what they compute, what they replace, how they resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from distributed import Callback, Trainer
from distributed.backends._torch.schedule import Schedule
from distributed.config.merging import Overrides, merge
from distributed.config.optimization import NamedOptimizer, RateCurve, check_named, named
from distributed.errors import CheckpointError, ConfigError
from distributed.state import Job, TrainState
from distributed.training.remote import RemoteFit, remote_fit

BASE: dict[str, Any] = {
    "epochs": 3, "global_batch_size": 16, "dtype": "float64", "verbose": False, "device": "cpu", "shuffle": False,
    "log_every_n_steps": 1,
}  # fmt: skip
UPDATES = 12  # of three epochs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_log(self, state: Any, split: str, metrics: Any) -> None:
        self.seen[state.step] = metrics["learning_rate"]  # of the next update


def trained(**settings: Any) -> Trainer:
    trainer = Trainer(settings.pop("model", net), **{**BASE, **settings})
    trainer.fit(data())
    return trainer


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_hand(make: Any, factor: Any = lambda step: 1.0) -> torch.Tensor:
    """Return the weights of a plain loop over the same batches."""
    model = net().double()
    optimizer = make(model)
    full = [group["lr"] for group in optimizer.param_groups]
    x, y = data().tensors
    for step in range(UPDATES):
        cut = slice(16 * (step % 4), 16 * (step % 4) + 16)
        for group, rate in zip(optimizer.param_groups, full, strict=True):
            group["lr"] = rate * factor(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[cut]), y[cut]).backward()
        optimizer.step()
    return weights(model)


def split(model: Net, decay: float) -> list[dict[str, Any]]:
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


HAND = {
    "adamw": ({}, lambda m: torch.optim.AdamW(split(m, 0.01), lr=1e-3)),
    "adamw-decay": ({"weight_decay": 0.3, "betas": (0.8, 0.9)}, lambda m: torch.optim.AdamW(split(m, 0.3), lr=1e-3, betas=(0.8, 0.9))),
    "adam": ({"weight_decay": 0.3}, lambda m: torch.optim.Adam(split(m, 0.3), lr=1e-3)),
    "sgd": ({"momentum": 0.9, "learning_rate": 0.1}, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "adafactor": ({"learning_rate": 0.02}, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02)),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND)
def test_a_named_optimizer_makes_the_updates_of_torchs_own(name: str) -> None:
    settings, make = HAND[name]
    trainer = trained(optimizer=name.partition("-")[0], **settings)
    assert torch.equal(weights(trainer.model), by_hand(make))


def test_muon_updates_the_matrices_of_linear_layers_and_adamw_the_rest() -> None:
    trainer = trained(optimizer="muon", weight_decay=0.1, momentum=0.9, betas="0.8,0.9")
    model = net().double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.0)
    x, y = data().tensors
    for step in range(UPDATES):
        cut = slice(16 * (step % 4), 16 * (step % 4) + 16)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x[cut]), y[cut]).backward()
        muon.step()
        adamw.step()
    assert torch.equal(weights(trainer.model), weights(model))


def test_what_decays_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(**settings: Any) -> str:
        trained(max_steps=2, verbose=True, **settings)
        return capsys.readouterr().out

    decay = "of 6 parameters: not on biases and norms"
    assert shown(optimizer="adamw", weight_decay=0.25).count(f"weight_decay=0.25 on 2 {decay}") == 1
    assert shown(optimizer="adam", weight_decay=0.25).count(f"weight_decay=0.25 on 2 {decay}") == 1
    assert shown(optimizer="adamw").count(f"weight_decay=0.01 on 2 {decay}") == 1  # the default of the name
    muon = shown(optimizer="muon")
    assert muon.count(f"weight_decay=0.01 on 2 {decay}") == 1
    assert muon.count("muon updates 2 weights of linear layers, and adamw the other 4 parameters") == 1
    for without in ({"optimizer": "adamw", "weight_decay": 0.0}, {"optimizer": "sgd"}, {}):
        assert "weight_decay" not in shown(**without)


def test_muon_needs_a_linear_layer() -> None:
    with pytest.raises(ConfigError, match="the weights of linear layers, and the model has none: choose adamw"):
        trained(optimizer="muon", model=lambda: torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Bilinear(8, 8, 2)))


def test_layer_rates_apply_to_the_longest_start_of_a_name() -> None:
    wanted = NamedOptimizer("adamw", 1.0, 0.0, layer_rates={"body": 0.1, "body.0": 0.5, "head.bias": 2.0})
    names = {"body.0.weight": 0.5, "body.1.weight": 0.1, "body1.weight": 1.0, "head.bias": 2.0, "head.weight": 1.0}
    assert {name: wanted.factor(name) for name in names} == names
    rates = {"body": 0.1, "head": 1.0}
    trainer = trained(optimizer="sgd", learning_rate=0.1, layer_rates=rates)

    def make(model: Net) -> torch.optim.Optimizer:
        groups = [{"params": model.body.parameters(), "lr": 0.1 * 0.1}, {"params": model.head.parameters(), "lr": 0.1}]
        return torch.optim.SGD(groups)

    assert torch.equal(weights(trainer.model), by_hand(make))
    with pytest.raises(
        ConfigError, match=r"layer_rates names 'bodi', but no trainable parameter begins with it .did you mean 'body'"
    ):
        trained(layer_rates={"bodi": 0.1})
    with pytest.raises(ConfigError, match=r"^layer_rates: 'body' has the factor 0, which must be above 0: raise it"):
        trained(layer_rates={"body": 0.0})


# ------------------------------------------------------------------ schedules


def test_the_curves_have_their_shapes() -> None:
    for warmup, length in ((0, 10), (4, 20), (19, 20)):
        for step in range(length + 3):
            done = min(1.0, max(0.0, (step - warmup) / (length - warmup)))
            expected = {
                "constant": 1.0, "linear": 1 - 0.9 * done, "polynomial": 0.1 + 0.9 * (1 - done) ** 3,
                "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2,
            }  # fmt: skip
            for kind, value in expected.items():
                curve = RateCurve(kind, length, warmup, 0.02, 3.0)
                assert curve.factor(step, 0.2) == pytest.approx(value, abs=1e-15)
    wsd = RateCurve("wsd", 100, 10, 0.0, decay_ratio=0.2)
    assert [wsd.factor(step, 1.0) for step in (0, 50, 80)] == [1.0] * 3
    assert [wsd.factor(step, 1.0) for step in (90, 100, 200)] == pytest.approx([0.5, 0.0, 0.0])
    assert [RateCurve("wsd", 4).factor(step, 1.0) for step in (3, 4)] == [1.0, 0.0]
    assert RateCurve("linear", 4, minimum=1.0).factor(4, 0.1) == 1.0


def test_a_named_schedule_follows_its_curve_over_the_updates_of_the_run() -> None:
    rates = Rates()
    settings = {"scheduler": "cosine", "warmup_steps": 4, "min_learning_rate": 0.01, "learning_rate": 0.1}
    trainer = trained(optimizer="sgd", callbacks=[rates], **settings)
    curve = RateCurve("cosine", UPDATES, 4, 0.01)

    def factor(step: int) -> float:
        return curve.factor(step, 0.1) * min(1.0, (step + 1) / 4)

    assert rates.seen == pytest.approx({step: 0.1 * factor(step) for step in range(1, UPDATES + 1)})
    hand = by_hand(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), factor)
    assert float((weights(trainer.model) - hand).abs().max()) < 1e-15


def test_a_warm_up_that_is_longer_than_the_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    trained(optimizer="sgd", warmup_steps=UPDATES + 1, verbose=True)
    assert (
        f"warning: warmup_steps={UPDATES + 1} is more than the {UPDATES} updates of this run" in capsys.readouterr().out
    )
    trained(optimizer="sgd", warmup_steps=UPDATES, verbose=True)
    assert "warning: warmup_steps" not in capsys.readouterr().out


def test_the_schedule_of_an_optimizer_that_the_script_passes_may_be_named() -> None:
    rates = Rates()
    trained(optimizer=lambda params: torch.optim.SGD(params, lr=0.5), scheduler="linear", callbacks=[rates])
    assert rates.seen == pytest.approx({step: 0.5 * (1 - step / UPDATES) for step in range(1, UPDATES + 1)})


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit_with_the_length_of_its_schedule(optimizer: str) -> None:
    settings = {
        "optimizer": optimizer, "scheduler": "cosine", "weight_decay": 0.1, "warmup_steps": 2, "layer_rates": {"body": 0.5},
        "scheduler_steps": UPDATES,
    }  # fmt: skip
    whole = trained(**settings)
    cut = trained(max_steps=7, **settings)
    assert cut.history is not None
    checkpoint = f"{cut.history.run_dir}/checkpoints/step-00000007"
    del settings["scheduler_steps"]
    again = trained(resume_from_checkpoint=checkpoint, **settings | {"epochs": 3})
    assert torch.equal(weights(again.model), weights(whole.model))
    longer = Rates()
    trained(resume_from_checkpoint=checkpoint, callbacks=[longer], **settings | {"epochs": 5})
    assert longer.seen[UPDATES] == longer.seen[UPDATES + 3] == 0.0  # the run is longer, and its schedule is not
    stretched = Rates()
    trained(resume_from_checkpoint=checkpoint, callbacks=[stretched], scheduler_steps=20, **settings | {"epochs": 5})
    assert stretched.seen[UPDATES] > 0 == stretched.seen[20]


@pytest.mark.parametrize("scheduler", [None, "linear"])
def test_settings_of_the_optimizer_that_changed_since_the_checkpoint_count(scheduler: str | None) -> None:
    settings: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.1, "layer_rates": {"body": 0.1}}
    if scheduler is not None:
        settings |= {"scheduler": scheduler, "scheduler_steps": UPDATES}
    cut = trained(max_steps=7, **settings)
    assert cut.history is not None
    checkpoint = f"{cut.history.run_dir}/checkpoints/step-00000007"
    changed = {"weight_decay": 0.3, "layer_rates": {"body": 0.5}, "betas": (0.8, 0.9), "learning_rate": 2e-3}
    trainer = trained(resume_from_checkpoint=checkpoint, max_steps=8, **settings | changed)
    factor = 1.0 if scheduler is None else 1 - 8 / UPDATES
    groups = trainer._fits.backend.optimizer.param_groups
    assert [group["lr"] for group in groups] == pytest.approx([2e-3 * factor] * 2 + [1e-3 * factor] * 2)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0, 0.3, 0.0]
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in groups)


class Lowers(Callback):
    """Divide the rates by ten in the user's own code."""

    def on_step_end(self, state: Any, result: Any) -> None:
        for group in self.context.optimizer.param_groups if state.step == 4 else ():
            group["lr"] /= 10


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0)


@pytest.mark.parametrize(("given", "is_old"), [("a schedule", False), ("a schedule", True), ("a callback", False)])
def test_a_rate_that_was_lowered_in_the_run_stays_lowered_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, given: str, is_old: bool
) -> None:
    """Old checkpoints hold the first rate only."""
    settings: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "layer_rates": {"body": 0.5}}
    settings |= {"scheduler": plateau, "monitor": "loss"} if given == "a schedule" else {}

    def fit(**more: Any) -> tuple[Trainer, list[float]]:
        trainer = trained(callbacks=[Lowers()] if given == "a callback" else [], **settings | more)
        return trainer, [group["lr"] for group in trainer._fits.backend.optimizer.param_groups]

    whole, rates = fit()
    with monkeypatch.context() as patch:
        if is_old:
            state = Schedule.state
            patch.setattr(
                Schedule, "state", lambda self: {k: v for k, v in state(self).items() if k != "learning_rates"}
            )
        cut, _ = fit(max_steps=11)
    assert cut.history is not None
    checkpoint = Path(cut.history.run_dir, "checkpoints/step-00000011")
    resumed, found = fit(resume_from_checkpoint=str(checkpoint))
    assert found == rates == pytest.approx([0.01, 0.005] if given == "a callback" else [1e-4, 5e-5])
    assert torch.equal(weights(resumed.model), weights(whole.model))
    _, halved = fit(resume_from_checkpoint=str(checkpoint), learning_rate=0.05)
    assert halved == pytest.approx([rate / 2 for rate in rates])


@pytest.mark.parametrize("rates", [[0.0], "x", 7, [None]])
def test_rates_of_a_checkpoint_that_cannot_be_are_one_line(monkeypatch: pytest.MonkeyPatch, rates: Any) -> None:
    state = Schedule.state
    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "state", lambda self: {**state(self), "learning_rates": rates})
        cut = trained(max_steps=7, optimizer="sgd", weight_decay=0.0)
    assert cut.history is not None
    with pytest.raises(CheckpointError, match="its state does not fit this run"):
        trained(
            optimizer="sgd", weight_decay=0.0, resume_from_checkpoint=f"{cut.history.run_dir}/checkpoints/step-00000007"
        )


def test_another_schedule_than_that_of_the_checkpoint_is_refused() -> None:
    cut = trained(max_steps=7, scheduler="cosine")
    assert cut.history is not None
    with pytest.raises(Exception, match="the schedule is linear, the checkpoint holds cosine: use cosine"):
        trained(scheduler="linear", resume_from_checkpoint=f"{cut.history.run_dir}/checkpoints/step-00000007")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = data().tensors
        yield from zip(x, y, strict=True)


def test_a_stream_needs_the_number_of_updates() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler='linear' needs the number of updates.*set max_steps, or scheduler_steps"
    ):
        Trainer(net, scheduler="linear", **BASE).fit(Stream())
    rates = Rates()
    Trainer(net, scheduler="linear", max_steps=4, callbacks=[rates], **BASE).fit(Stream())
    assert rates.seen[4] == 0.0 and rates.seen[2] == pytest.approx(5e-4)
    Trainer(net, scheduler="constant", **BASE).fit(Stream())


# ------------------------------------------------------------------ what is refused, and what replaces what

SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
REFUSED = {
    "betas has no effect with optimizer='sgd': drop it, or choose adamw or adam or muon": {"optimizer": "sgd", "betas": (0.9, 0.9)},
    "momentum has no effect with optimizer='adamw'": {"momentum": 0.5},
    "scheduler_power has no effect with scheduler='cosine': drop it, or choose polynomial": {"scheduler": "cosine", "scheduler_power": 3},
    "min_learning_rate has no effect without a schedule": {"min_learning_rate": 1e-5},
    "min_learning_rate=0.1 is above learning_rate=0.001": {"scheduler": "cosine", "min_learning_rate": 0.1},
    "scheduler_steps=5 leaves no update after warmup_steps=5": {"scheduler": "cosine", "scheduler_steps": 5, "warmup_steps": 5},
    "scheduler_interval='epoch' does not work with scheduler='cosine'": {"scheduler": "cosine", "scheduler_interval": "epoch"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_contradict_each_other_are_refused(message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(net, **REFUSED[message])
    assert message in str(error.value)


def test_a_flag_replaces_an_object_of_the_script_and_a_file_does_not() -> None:
    def found(job: Job, file: dict[str, Any] | None = None, flag: dict[str, Any] | None = None, **code: Any) -> Any:
        merged = merge(Overrides(file or {}, flag or {}), code)
        check_named(merged, job)
        job, notices = named(merged, job, 10)
        return getattr(job.optimizer, "name", job.optimizer), getattr(job.scheduler, "kind", job.scheduler), notices

    job = Job(net, SGD)
    assert found(job) == (SGD, None, [])
    assert found(job, flag={"optimizer": "adamw"}) == (
        "adamw",
        None,
        ["optimizer=adamw replaces the optimizer of the script"],
    )
    kept = "no effect here: optimizer, weight_decay (the script passes an optimizer)"
    assert found(job, file={"optimizer": "adamw", "weight_decay": 0.1}) == (SGD, None, [kept])
    assert found(Job(net), file={"weight_decay": 0.1})[0] == "adamw"
    for layer in ({"weight_decay": 0.1}, {"flag": {"weight_decay": 0.1}}):
        with pytest.raises(ConfigError, match="weight_decay has no effect on the optimizer that the script passes"):
            found(job, **layer)
    with pytest.raises(ConfigError, match="optimizer='adam' and an object passed as optimizer both set the optimizer"):
        found(job, optimizer="adam")
    schedule = torch.optim.lr_scheduler.StepLR(SGD, 3)
    both = dataclasses.replace(job, scheduler=schedule)
    assert found(both, flag={"scheduler": "cosine"})[1:] == (
        "cosine",
        ["scheduler=cosine replaces the schedule of the script"],
    )
    with pytest.raises(ConfigError, match="replaces the optimizer to which the script's schedule belongs"):
        found(both, flag={"optimizer": "adamw"})
    assert found(both, flag={"optimizer": "adamw", "scheduler": "linear"})[:2] == ("adamw", "linear")


def test_a_save_before_the_first_fit_holds_the_named_optimizer(tmp_path: Path) -> None:
    settings = {**BASE, "optimizer": "sgd", "momentum": 0.9, "scheduler": "linear"}
    path = Trainer(net, **settings).save(tmp_path / "saved")
    again = Trainer(net, resume_from_checkpoint=str(path), **settings)
    again.fit(data())
    assert torch.equal(weights(again.model), weights(trained(optimizer="sgd", momentum=0.9, scheduler="linear").model))


def test_names_reach_workers_that_a_fit_starts() -> None:
    trainer = Trainer(net, optimizer="sgd", scheduler="linear", nproc_per_node=2, device="cpu")
    fit = remote_fit(RemoteFit, trainer._fits, trainer.merged, None, data())
    made = fit.trainer_class(**fit.arguments, **fit.settings)
    assert isinstance(made, Trainer) and (made.merged.config.optimizer, made.merged.config.scheduler) == (
        "sgd",
        "linear",
    )


def test_a_value_of_none_is_not_given() -> None:
    nothing = dict.fromkeys(
        ["weight_decay", "betas", "momentum", "optimizer", "scheduler", "scheduler_steps", "layer_rates"]
    )
    assert torch.equal(weights(trained(**nothing).model), by_hand(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)))


SWEEPS: list[tuple[dict[str, Any], Any]] = [
    ({"optimizer": "adamw", "momentum": 0.9}, lambda m: torch.optim.AdamW(split(m, 0.01), lr=1e-3)),
    ({"optimizer": "sgd", "momentum": 0.9}, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9)),
    ({"scheduler": "constant", "min_learning_rate": 1e-5}, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)),
]


@pytest.mark.parametrize(("sweep", "make"), SWEEPS)
def test_a_sweep_may_have_settings_that_some_of_its_values_do_not_use(sweep: dict[str, Any], make: Any) -> None:
    trainer = Trainer(net, sweep, **BASE)
    history = trainer.fit(data())
    assert torch.equal(weights(trainer.model), by_hand(make))
    config = yaml.safe_load(Path(history.run_dir, "config.yaml").read_text())
    assert {name: config[name] for name in sweep} == sweep


def test_the_minimum_is_that_of_the_optimizers_own_rate() -> None:
    rates = Rates()
    trained(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        scheduler="linear",
        min_learning_rate=0.1,
        callbacks=[rates],
    )
    assert rates.seen[UPDATES] == pytest.approx(0.1) and rates.seen[6] == pytest.approx(0.3)


def test_names_are_arguments_of_the_trainer_too() -> None:
    trainer = Trainer(net, optimizer="adafactor", scheduler="wsd")
    assert trainer.merged.config.optimizer == "adafactor" and trainer.merged.config.scheduler == "wsd"
    for wrong, text in (
        (("optimizer", "admw"), "did you mean 'adamw'"),
        (("scheduler", "cosin"), "did you mean 'cosine'"),
    ):
        with pytest.raises(ConfigError, match=text):
            Trainer(net, **dict([wrong]))


class GroupRates(Callback):
    """Record the rates of each update."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_before_update(self, state: TrainState) -> None:
        self.seen.append([float(group["lr"]) for group in self.context.optimizer.param_groups])


def rates_of(steps: int, **settings: Any) -> tuple[Any, list[list[float]]]:
    """Return the result of a fit, and the rates of its updates."""
    rates = GroupRates()
    trainer = Trainer(
        torch.nn.Linear(3, 1), loss_fn=torch.nn.functional.mse_loss, max_steps=steps, batch_size=8, epochs=9, backend="single",
        checkpoint_every_n_steps=2, callbacks=[rates], verbose=False, **settings,
    )  # fmt: skip
    return trainer.fit(TensorDataset(torch.ones(64, 3), torch.ones(64, 1))), rates.seen


@pytest.mark.parametrize("optimizer", ["adamw", "own"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k)), "scheduler_interval": "step"},
        {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda k: 1 / (1 + k))},
        {"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer), "monitor": "loss"},
        {"scheduler": "cosine", "scheduler_steps": 10},
    ],
    ids=["updates", "epochs", "plateau", "by name"],
)
def test_a_schedule_that_the_checkpoint_lacks_begins_with_the_rates_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any], optimizer: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def of(rate: float) -> dict[str, Any]:
        if optimizer == "own":
            return {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=rate)}
        return {"optimizer": optimizer, "learning_rate": rate}

    first, _ = rates_of(2, **of(1e-3))
    _, fresh = rates_of(4, **of(1e-4), **schedule)
    _, resumed = rates_of(6, **of(1e-4), **schedule, resume_from_checkpoint=str(first.run_dir))
    assert len(resumed) == 4 and resumed == fresh
