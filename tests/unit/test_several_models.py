"""Several models and optimizers in one Trainer: updates, accumulation, schedules, checkpoints, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.callbacks import ExponentialMovingAverage, Freeze, WeightAveraging
from distributed.config.merging import Overrides, merge
from distributed.config.optimization import NamedOptimizer, RateCurve, check_named, named
from distributed.errors import CheckpointError, ConfigError, TrainingError
from distributed.loggers.logged import log
from distributed.training.several import several_job

SAMPLES, BATCH, EPOCHS = 50, 16, 3
UPDATES = 4 * EPOCHS  # the last of each epoch has two samples
BASE: dict[str, Any] = {
    "epochs": EPOCHS, "global_batch_size": BATCH, "dtype": "float64", "verbose": False, "device": "cpu", "shuffle": False,
    "log_every_n_steps": 1, "backend": "single",
}  # fmt: skip


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


MODELS = {"g": generator, "d": critic}


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    real = torch.randn(SAMPLES, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(real, torch.randn(SAMPLES, 3, generator=drawn, dtype=torch.float64))


def in_float32() -> TensorDataset:
    return TensorDataset(*(column.float() for column in data().tensors))


def d_loss(models: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return softplus(-models["d"](real)).mean() + softplus(models["d"](fake.detach())).mean()


def gan(models: Any, batch: Any, update: Any) -> None:
    real, noise = batch
    fake = models["g"](noise)
    update("d", d_loss(models, real, fake))
    update("g", softplus(-models["d"](fake)).mean())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(**settings: Any) -> Trainer:
    given = {"models": MODELS, "optimizers": {"g": adam, "d": sgd}, "training_step": gan, **BASE, **settings}
    val = given.pop("val", None)
    trainer = Trainer(**given)
    trainer.fit(data() if given["dtype"] == "float64" else in_float32(), val)
    return trainer


def weights(models: Any) -> torch.Tensor:
    return torch.cat([nn.utils.parameters_to_vector(models[name].parameters()).detach() for name in models])


def fresh() -> dict[str, nn.Module]:
    """Return the models as a fit builds them from seed 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {name: make().double() for name, make in MODELS.items()}


def by_hand(
    step: Callable[[dict[str, nn.Module], Any, Any], None], rates: Any = None, clip: float | None = None
) -> Any:
    """Return the weights of a plain loop, which makes an update where `step` calls `update`."""
    models = fresh()
    optimizers = {"g": adam(models["g"].parameters()), "d": sgd(models["d"].parameters())}
    full = {name: each.param_groups[0]["lr"] for name, each in optimizers.items()}
    number = 0

    def update(name: str, loss: torch.Tensor) -> None:
        parameters = list(models[name].parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizers[name].param_groups[0]["lr"] = full[name] * (rates(name, number) if rates else 1.0)
        optimizers[name].step()

    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            step(models, [column[start : start + BATCH] for column in data().tensors], update)
            number += 1
    return weights(models)


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max())


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("accumulation", [1, 3])
def test_updates_equal_those_of_a_plain_loop_at_any_accumulation(accumulation: int) -> None:
    trainer = trained(gradient_accumulation_steps=accumulation, gradient_clipping=0.2)

    assert apart(weights(trainer.model), by_hand(gan, clip=0.2)) < 1e-12
    assert trainer.history is not None and trainer.history.steps == UPDATES


def twice(models: Any, batch: Any, update: Any) -> None:
    """Update the critic twice, and the generator from outputs of before."""
    real, noise = batch
    fake = models["g"](noise)
    for _ in range(2):
        update("d", d_loss(models, real, fake))
    update("g", softplus(-models["d"](fake)).mean())
    update("d", d_loss(models, real, fake))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_may_be_updated_several_times_and_after_another(accumulation: int) -> None:
    trainer = trained(training_step=twice, gradient_accumulation_steps=accumulation)

    assert apart(weights(trainer.model), by_hand(twice)) < 1e-12


def test_schedules_and_warm_up_count_update_batches() -> None:
    trainer = trained(
        training_step=twice, warmup_steps=4, gradient_accumulation_steps=2,
        schedulers={"d": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)},
    )  # fmt: skip

    def rates(name: str, number: int) -> float:
        return min(1.0, (number + 1) / 4) * (0.8**number if name == "d" else 1.0)

    assert apart(weights(trainer.model), by_hand(twice, rates)) < 1e-12


def pairs(models: Any, batch: Any, update: Any) -> dict[str, Any]:
    """Weigh the samples, so that the losses are sums with counts."""
    real, noise = batch
    weight = 1.0 + (noise[:, :1] > 0)
    fake = models["g"](noise)
    each = softplus(-models["d"](real)) + softplus(models["d"](fake.detach()))
    update("d", ((each * weight).sum(), weight.sum()))
    update("g", softplus(-models["d"](fake)).mean())
    return {"loss": each.detach().mean()}


def test_sums_with_counts_do_not_depend_on_the_split() -> None:
    whole, cut = (trained(training_step=pairs, gradient_accumulation_steps=each, val=data()) for each in (1, 3))

    assert apart(weights(whole.model), weights(cut.model)) < 1e-12
    for one, other in zip(whole.history.rows, cut.history.rows, strict=True):
        assert all(other[name] == pytest.approx(one[name], abs=1e-12) for name in ("loss", "d_loss", "val_d_loss"))


def test_a_model_has_losses_of_one_form() -> None:
    def step(models: Any, batch: Any, update: Any) -> None:
        update("d", models["d"](batch[0]).mean())
        update("d", (models["d"](batch[0]).sum(), len(batch[0])))

    wrong(step, r"update\('d', ...\) got a mean over samples and a pair \(sum, count\)")


def test_sums_with_counts_are_not_added_to_one_loss() -> None:
    def step(models: Any, batch: Any, update: Any) -> None:
        pairs(models, batch, update)

    with pytest.raises(ConfigError, match=r"the loss of update\('d', ...\) is not a mean over samples"):
        trained(training_step=step)


def test_each_loss_is_reported_by_name_and_their_sum_as_loss() -> None:
    logged: list[Any] = []

    class Log(Callback):
        def on_log(self, state: Any, split: str, metrics: Any) -> None:
            logged.append((split, dict(metrics)))

    trainer = trained(callbacks=[Log()], val=data(), monitor="val_d_loss", early_stopping_patience=9)

    models, (real, noise) = fresh(), [column[:BATCH] for column in data().tensors]
    first = logged[0][1]
    assert first["d_loss"] == pytest.approx(d_loss(models, real, models["g"](noise)).item(), abs=1e-12)
    assert all(values["loss"] == pytest.approx(values["d_loss"] + values["g_loss"]) for _, values in logged)
    assert trainer.history is not None and "val_d_loss" in trainer.history.best_metrics
    real, noise = data().tensors
    fake = trainer.model["g"](noise)
    assert trainer.evaluate(data())["d_loss"] == pytest.approx(d_loss(trainer.model, real, fake).item(), abs=1e-12)


def test_what_the_step_returns_is_reported_too() -> None:
    def step(models: Any, batch: Any, update: Any) -> Any:
        gan(models, batch, update)
        return {"loss": batch[0].mean(), "score": (models["d"](batch[0]).sum(), len(batch[0]))}

    trainer = trained(training_step=step, gradient_accumulation_steps=2)

    assert trainer.history is not None
    assert trainer.history.rows[-1]["loss"] == pytest.approx(data().tensors[0].mean().item(), abs=1e-12)
    assert "score" in trainer.history.rows[-1]


def test_evaluation_changes_nothing() -> None:
    trainer = trained()
    before = weights(trainer.model).clone()

    trainer.evaluate(data())

    assert torch.equal(weights(trainer.model), before)


def test_activations_may_be_recomputed() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))

    plain, recomputed = (
        trained(models={"g": deep, "d": critic}, activation_checkpointing=each, gradient_accumulation_steps=2)
        for each in (False, True)
    )

    assert torch.equal(weights(plain.model), weights(recomputed.model))


# ------------------------------------------------------------------ a model that is not trained


def distil(models: Any, batch: Any, update: Any) -> None:
    with torch.no_grad():
        wanted = models["teacher"](batch[1])
    update("student", (models["student"](batch[1]) - wanted).square().mean())


def test_a_model_without_an_optimizer_is_a_teacher() -> None:
    modes: list[bool] = []

    def step(models: Any, batch: Any, update: Any) -> None:
        modes.append(models["teacher"].training or any(p.requires_grad for p in models["teacher"].parameters()))
        distil(models, batch, update)

    teacher = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    teacher[0].bias.requires_grad = False
    before = {name: value.clone().double() for name, value in teacher.state_dict().items()}

    trainer = trained(
        models={"teacher": teacher, "student": generator}, optimizers={"student": adam}, training_step=step
    )

    needs = [True, False, True, True]  # a gradient, as before
    assert [parameter.requires_grad for parameter in teacher.parameters()] == needs
    trainer.fit(data(), epochs=1)
    assert [parameter.requires_grad for parameter in teacher.parameters()] == needs and not any(modes)
    assert all(torch.equal(value.double(), before[name]) for name, value in teacher.state_dict().items())
    assert trainer.history is not None and trainer.history.rows[-1]["loss"] < trainer.history.rows[0]["loss"]
    assert trainer.history.rows[0]["loss"] == trainer.history.rows[0]["student_loss"]


def test_an_update_of_a_teacher_is_refused() -> None:
    def step(models: Any, batch: Any, update: Any) -> None:
        update("d", models["d"](models["g"](batch[1])).mean())

    with pytest.raises(ConfigError, match="the model 'd' is not trained: give it an optimizer"):
        trained(optimizers={"g": adam}, training_step=step)


# ------------------------------------------------------------------ checkpoints

RESUMABLE: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "warmup_steps": 3,
    "schedulers": {"g": "cosine", "d": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)},
    "scheduler_steps": UPDATES,
}  # fmt: skip


def checkpoint(trainer: Trainer) -> Path:
    assert trainer.history is not None
    return max((Path(trainer.history.run_dir) / "checkpoints").iterdir())


def test_a_resumed_run_ends_in_the_same_bits() -> None:
    whole = trained(**RESUMABLE)
    cut = trained(**RESUMABLE, max_steps=7)

    resumed = trained(**RESUMABLE, resume_from_checkpoint=str(checkpoint(cut)))

    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.history is not None and resumed.history.steps == UPDATES


def test_a_checkpoint_has_names_with_the_model_in_front() -> None:
    trainer = trained(**RESUMABLE, max_steps=2)
    path = checkpoint(trainer)

    assert "d.0.weight" in load_file(path / "model" / "model.safetensors")
    assert "state.g.0.weight.exp_avg" in load_file(path / "optimizer" / "optimizer.safetensors")
    state = json.loads((path / "state.json").read_text())
    assert state["backend"]["optimizer"]["classes"] == {"g": "Adam", "d": "SGD"}
    trainer.save("weights.safetensors")
    assert torch.equal(load_file("weights.safetensors")["g.2.bias"], trainer.model["g"][2].bias)


def test_another_optimizer_does_not_take_a_checkpoint() -> None:
    cut = trained(max_steps=2)

    with pytest.raises(CheckpointError, match=r"the optimizers are {'g': 'SGD', 'd': 'SGD'}, the checkpoint holds"):
        trained(optimizers={"g": sgd, "d": sgd}, resume_from_checkpoint=str(checkpoint(cut)))


def test_a_second_fit_and_one_after_an_evaluation_go_on() -> None:
    once, twice_ = trained(), Trainer(models=MODELS, optimizers={"g": adam, "d": sgd}, training_step=gan, **BASE)
    twice_.evaluate(data())
    twice_.fit(data(), epochs=1)
    twice_.fit(data(), epochs=EPOCHS - 1)

    assert torch.equal(weights(once.model), weights(twice_.model))


def test_given_modules_get_the_weights() -> None:
    models = fresh()

    trainer = trained(models=models, optimizers={"g": adam(models["g"].parameters()), "d": sgd})

    assert apart(weights(models), by_hand(gan)) < 1e-12
    assert trainer.model["g"] is models["g"] and "g, d" in repr(trainer)


# ------------------------------------------------------------------ precision, NaN


def test_each_model_has_a_loss_scale() -> None:
    settings = {"dtype": "float32", "mixed_precision": "fp16", "max_steps": 2, "scaler_init_scale": 64.0}
    trainer = trained(**settings, gradient_accumulation_steps=2, scaler_growth_interval=1)

    scaler = json.loads((checkpoint(trainer) / "state.json").read_text())["backend"]["scaler"]
    assert {name: each["scale"] for name, each in scaler.items()} == {"g": 256.0, "d": 256.0}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_later_loss_sees_the_new_weights_in_mixed_precision(accumulation: int) -> None:
    """autocast keeps the casts of weights until its context ends, and training_step runs in one context."""
    trainer = trained(
        dtype="float32",
        mixed_precision="bf16",
        max_steps=1,
        gradient_accumulation_steps=accumulation,
        training_step=twice,
    )

    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = {name: make() for name, make in MODELS.items()}
    optimizers = {"g": adam(models["g"].parameters()), "d": sgd(models["d"].parameters())}
    real, noise = (column[:BATCH] for column in in_float32().tensors)
    cast = torch.autocast("cpu", torch.bfloat16)
    with cast:
        fake = models["g"](noise)
    for name in ("d", "d", "g", "d"):
        with cast:
            loss = d_loss(models, real, fake) if name == "d" else softplus(-models["d"](fake)).mean()
        optimizers[name].zero_grad()
        loss.backward(inputs=list(models[name].parameters()))
        optimizers[name].step()
    assert apart(weights(trainer.model), weights(models)) < (1e-6 if accumulation == 1 else 1e-3)


def test_an_update_that_is_not_finite_is_left_out_alone() -> None:
    steps = 0

    def step(models: Any, batch: Any, update: Any) -> None:
        nonlocal steps
        steps += 1
        fake = models["g"](batch[1])
        update("d", d_loss(models, batch[0], fake) * (float("nan") if steps == 2 else 1.0))
        update("g", softplus(-models["d"](fake)).mean())

    trainer = trained(training_step=step, nan_policy="skip", max_steps=2)
    models = trained(max_steps=1).model

    assert apart(weights({"d": trainer.model["d"]}), weights({"d": models["d"]})) == 0.0
    assert apart(weights({"g": trainer.model["g"]}), weights({"g": models["g"]})) > 1e-4
    steps = 1
    with pytest.raises(TrainingError, match="d: step 1: the loss is nan on rank 0"):
        trained(training_step=step)


# ------------------------------------------------------------------ settings


def test_settings_that_name_an_optimizer_are_for_all_models_and_names_in_arguments_for_one() -> None:
    job = several_job(MODELS, {"g": None, "d": "sgd"}, {"d": "linear"}, gan, {}, of_one_model={})

    found, _ = named(merge(Overrides(), {"optimizer": "adam", "learning_rate": 0.2}), job, 10)

    assert isinstance(found.optimizer["g"], NamedOptimizer) and found.optimizer["g"].name == "adam"
    assert found.optimizer["d"].name == "sgd" and found.optimizer["d"].learning_rate == 0.2
    assert found.scheduler["g"] is None and isinstance(found.scheduler["d"], RateCurve)


def test_a_setting_that_one_optimizer_takes_is_no_error_for_the_others() -> None:
    job = several_job(MODELS, {"g": "adam", "d": "sgd"}, None, gan, {}, of_one_model={})

    check_named(merge(Overrides(), {"betas": (0.5, 0.9), "momentum": 0.5}), job)
    found, _ = named(merge(Overrides(), {"betas": (0.5, 0.9)}), job, 10)
    assert found.optimizer["g"].betas == (0.5, 0.9)
    with pytest.raises(ConfigError, match="scheduler_steps has no effect without a schedule"):
        check_named(merge(Overrides(), {"scheduler_steps": 5}), job)


def test_a_flag_replaces_the_optimizers_of_all_models() -> None:
    job = several_job(MODELS, {"g": adam, "d": "sgd"}, None, gan, {}, of_one_model={})

    found, notices = named(merge(Overrides(flag={"optimizer": "adamw"}), {}), job, 10)

    assert [found.optimizer[name].name for name in ("g", "d")] == ["adamw", "adamw"]
    assert notices[0] == "g: optimizer=adamw replaces the optimizer of the script"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": critic}, "model is for one model: with models, pass the model as an entry of models"),
        ({"optimizer": sgd}, r"optimizer is for one model: with models, pass optimizers=\{NAME: ...\}"),
        ({"loss_fn": softplus, "training_step": None}, "loss_fn is for one model: with models, pass training_step=step"),
        ({"training_step": None}, "models needs training_step=step, with a function step"),
        ({"models": [generator]}, "pass modules or factories by name"),
        ({"models": {"a-b": generator}}, "'a-b' is not a name"),
        ({"models": {"g": 3}}, r"models\['g'\] is a int: pass a module"),
        ({"optimizers": {"q": sgd}}, "optimizers names 'q', but there is no such model"),
        ({"optimizers": {"g": 0.1}}, r"optimizers\['g'\] is a float: pass a name, an object or a factory"),
        ({"optimizers": {"g": lambda: None}}, r"optimizers\['g'\]=<lambda> is called with one argument, .*takes \(\): pass"),
        ({"optimizers": {}}, "optimizers is empty"),
        ({"optimizers": [sgd]}, "optimizers is a list: pass them by the names of models"),
        ({"optimizers": {"g": sgd}, "schedulers": {"d": "cosine"}}, "schedulers names 'd', but there is no such trained model"),
        ({"optimizers": {"g": "lamb"}}, "lamb"),
        ({"optimizers": {"g": "admw", "d": sgd}}, r"^of the model 'g': optimizer='admw'.*did you mean 'adamw'"),
        ({"optimizers": {"g": sgd, "d": sgd}, "schedulers": {"d": "cosin"}}, r"scheduler='cosin'.*did you mean 'cosine'"),
        ({"models": {"generator": generator}, "optimizers": {"genrator": sgd}}, r"no such model .did you mean 'generator'"),
        ({"compile": True}, "compile does not work with several models"),
        ({"layer_rates": {"0": 0.1}, "optimizers": None}, "layer_rates does not work with several models"),
        ({"backend": "pytorch-ddp", "nproc_per_node": 2, "ddp": {"static_graph": True}}, "ddp.static_graph does not work with"),
        ({"backend": "pytorch-ddp", "nproc_per_node": 2, "ddp": {"comm_hook": "fp16"}}, "ddp.comm_hook does not work with"),
        ({"backend": "pytorch-ddp", "nproc_per_node": 2, "ddp": {"find_unused_parameters": True}}, "ddp.find_unused_parameters"),
        ({"models": {"train": generator, "d": critic}, "optimizers": None}, "'train' is the name of a method"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_answered(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(**arguments)


@pytest.mark.parametrize("backend", ["deepspeed", "horovod", "tensorflow"])
def test_other_engines_refuse(backend: str) -> None:
    from distributed.backends import backend_class
    from distributed.backends.capabilities import MODELS as ROW
    from distributed.backends.capabilities import capabilities_of
    from distributed.config.registry import backend_entry

    assert backend_class(backend).refuses_several == capabilities_of(backend_entry(backend)).refuses[ROW]
    with pytest.raises(ConfigError, match=f"backend='{backend}' does not take several models: it trains one model"):
        trained(backend=backend, dtype="float32", nproc_per_node=2)


def test_arguments_for_several_models_need_them() -> None:
    with pytest.raises(ConfigError, match="there is no model"):
        Trainer(**BASE)
    with pytest.raises(ConfigError, match="optimizers is for several models: pass optimizer"):
        Trainer(critic, optimizers={"d": sgd}, **BASE)


def test_what_needs_one_model_is_refused() -> None:
    trainer = Trainer(models=MODELS, training_step=gan, **BASE)

    with pytest.raises(ConfigError, match=r"predict\(\) calls one model: call trainer.model\[NAME\]"):
        trainer.predict(data())
    with pytest.raises(ConfigError, match=r"find_learning_rate\(\) finds the rate of one optimizer"):
        trainer.find_learning_rate(data())


def wrong(step: Any, match: str, **settings: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=match):
        trained(training_step=step, **settings)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_wrong_step_is_answered(accumulation: int) -> None:
    settings = {"gradient_accumulation_steps": accumulation}
    wrong(lambda models, batch, update: None, r"training_step never called update\(\)", **settings)
    wrong(lambda models, batch, update: update("D", batch[0].mean()), r"update\('D', ...\) names no model", **settings)
    wrong(lambda models, batch, update: update("d", batch[0].mean()), "the loss has no gradient", **settings)
    wrong(
        lambda models, batch, update: update("d", models["g"](batch[1]).mean()),
        "the loss of update\\('d', ...\\) does not depend on the model 'd'",
        **settings,
    )
    wrong(lambda models, batch, update: update("d", "loss"), "str", **settings)


def test_an_error_in_a_suspended_step_is_raised_and_leaves_no_thread() -> None:
    threads, calls = threading.active_count(), 0

    def step(models: Any, batch: Any, update: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("of the user")
        gan(models, batch, update)

    with pytest.raises(ZeroDivisionError, match="of the user"):
        trained(training_step=step, gradient_accumulation_steps=2)
    assert threading.active_count() <= threads


def test_micro_batches_must_make_the_same_calls() -> None:
    calls = 0

    def step(models: Any, batch: Any, update: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            gan(models, batch, update)
        else:
            update("d", d_loss(models, batch[0], models["g"](batch[1])))

    wrong(step, r"called update\('g', ...\) for one micro-batch and no further update", gradient_accumulation_steps=2)


def test_models_do_not_share_a_parameter() -> None:
    part = nn.Linear(4, 4)

    with pytest.raises(ConfigError, match=r"the models 'a' and 'b' share the parameter 0.weight"):
        trained(models={"a": nn.Sequential(part), "b": nn.Sequential(part)}, optimizers=None)


# ------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("accumulation", [1, 2])
def test_callbacks_freeze_and_average_weights_of_several_models(accumulation: int) -> None:
    seen: list[str] = []

    class Seen(Callback):
        def on_before_update(self, state: Any) -> None:
            seen.append("before an update")

        def on_train_start(self, state: Any) -> None:
            assert isinstance(self.context.optimizer["d"], torch.optim.SGD)
            assert self.context.model["g"][0].weight.shape == (8, 3)

    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 3}
    plain = trained(**settings)
    frozen = trained(**settings, callbacks=[Freeze("d.0"), Seen()])

    assert len(seen) == 2 * 3
    assert apart(frozen.model["d"][0].weight, fresh()["d"][0].weight) == 0.0
    assert apart(frozen.model["d"][2].weight, fresh()["d"][2].weight) > 0.0
    assert apart(weights(frozen.model), weights(plain.model)) > 1e-3


@pytest.mark.parametrize("average", ["exponential", "mean"])
def test_averages_of_several_models_are_those_of_their_formulas_and_resume_bit_for_bit(average: str) -> None:
    class Weighed(Callback):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_step_end(self, state: Any, result: Any) -> None:
            self.seen.append(weights(self.context.model))

    def make() -> Callback:
        return ExponentialMovingAverage(0.5) if average == "exponential" else WeightAveraging(0, every_n_steps=2)

    plain = Weighed()
    trained(callbacks=[plain])
    averaged = trained(callbacks=[make()])
    expected = weights(fresh())
    for each in plain.seen:
        expected = 0.5 * expected + 0.5 * each
    if average == "mean":
        expected = torch.stack(plain.seen[1::2]).mean(0)
    assert apart(weights(averaged.model), expected) < 1e-12 < apart(expected, plain.seen[-1])

    cut = trained(callbacks=[make()], max_steps=5)
    assert cut.history is not None
    checkpoint = Path(cut.history.run_dir) / "checkpoints/step-00000005"
    resumed = trained(callbacks=[make()], resume_from_checkpoint=str(checkpoint))
    assert apart(weights(resumed.model), weights(averaged.model)) == 0.0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_value_that_is_logged_in_a_step_weighs_its_samples(accumulation: int) -> None:
    def step(models: Any, batch: Any, update: Any) -> dict[str, Any]:
        real, noise = batch
        log("logged", real.mean())
        update("d", d_loss(models, real, models["g"](noise)))
        return {"returned": real.mean()}

    trainer = trained(training_step=step, optimizers={"d": sgd}, gradient_accumulation_steps=accumulation, epochs=1)
    assert trainer.history is not None
    row = trainer.history.rows[-1]
    assert row["logged"] == pytest.approx(row["returned"], abs=1e-12)
    assert row["returned"] == pytest.approx(float(data().tensors[0].mean()), abs=1e-12)


def test_each_optimizer_is_whole_by_itself_and_in_the_mapping() -> None:
    seen: list[dict[str, Any]] = []

    class Looks(Callback):
        def on_train_end(self, state: Any) -> None:
            own = self.context.optimizer
            seen.append({name: own[name].state_dict() for name in own})
            assert set(own) == {"g", "d"} and len(own) == 2 and "d" in own and own.get("x") is None

    trained(callbacks=[Looks()])
    assert {name: len(each["state"]) for name, each in seen[0].items()} == {"g": 4, "d": 4}


def test_weights_are_new_after_an_update_within_autocast_of_the_step() -> None:
    apart: list[float] = []

    def step(models: Any, batch: Any, update: Any) -> None:
        real, _ = batch
        with torch.autocast("cpu", torch.bfloat16):
            before = models["d"](real)
            update("d", before.float().mean())
            apart.append(float((models["d"](real) - before).abs().max().detach()))

    trained(training_step=step, optimizers={"d": lambda p: torch.optim.SGD(p, lr=1.0)}, dtype="float32", max_steps=1)
    assert apart[0] > 0.1


def test_a_step_that_calls_update_while_it_is_abandoned_ends_with_the_error_of_the_other_one() -> None:
    calls: list[int] = []

    def step(models: Any, batch: Any, update: Any) -> None:
        real, noise = batch
        calls.append(1)
        number = len(calls)
        try:
            update("d", d_loss(models, real, models["g"](noise)))
            if number == 2:
                raise ValueError("mine")
        finally:
            update("g", softplus(-models["d"](models["g"](noise))).mean())

    with pytest.raises(ValueError, match="mine"):
        trained(training_step=step, gradient_accumulation_steps=2)


def test_a_hook_before_an_update_may_evaluate_and_the_rest_of_the_step_trains() -> None:
    modes: list[bool] = []

    class Evaluates(Callback):
        def on_before_update(self, state: Any) -> None:
            self.context.evaluate(data())

    def step(models: Any, batch: Any, update: Any) -> None:
        if torch.is_grad_enabled():
            modes.append(models["d"].training)
        gan(models, batch, update)
        if torch.is_grad_enabled():
            modes.append(models["d"].training)

    trained(training_step=step, callbacks=[Evaluates()], max_steps=2)
    assert modes == [True] * 4
