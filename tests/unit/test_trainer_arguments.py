"""What a Trainer is given is looked at before anything starts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from distributed import Callback, ConfigError, FSDPTrainer, Trainer
from distributed.training.remote import _pickled


class Unsendable:
    """As a scripted module of torch, or an object of C++."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [TypeError, RuntimeError, pickle.PicklingError])
def test_what_cannot_be_pickled_is_a_sentence_whatever_it_raises(kind: type[Exception]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to its workers \(no state\): pass factories"):
        _pickled(Unsendable(kind("no state")))  # type: ignore[arg-type]


class Misspelt(Callback):
    def on_train_epoch_end(self, state: Any) -> None:
        """Lightning's name."""


class OfLightning(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:  # type: ignore[override]
        """Lightning's arguments."""


class LightningModule:
    """Stands for a class of Lightning, which is known by its name."""

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"optimizer": 1e-3},
            "optimizer=0.001 is a float: pass a name, an object or a factory, optimizer=torch.optim.Adam",
        ),
        ({"optimizer": "rmsprop"}, "optimizer='rmsprop' is not a valid choice"),
        ({"optimizer": [1, 2]}, r"optimizer=\[1, 2\] is a list"),
        (
            {"scheduler": 3},
            "scheduler=3 is a int: pass a name, an object or a factory, scheduler=lambda optimizer",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            r"scheduler=StepLR is called with one argument, StepLR\(optimizer\), and it takes \(optimizer, step_size, gamma",
        ),
        (
            {"optimizer": lambda: None},
            r"optimizer=<lambda> is called with one argument, .*, and it takes \(\): pass a function",
        ),
        ({"loss_fn": 3}, "loss_fn=3 is a int: pass a function"),
        ({"training_step": 3}, "training_step=3 is a int: pass a function"),
        ({"metrics": {1}}, r"metrics is a set: pass a list, metrics=\[.accuracy.\], or names and functions"),
        ({"metrics": {"acc": 3}}, r"metrics\['acc'\]=3 is a int: pass a function"),
        ({"metrics": {"step": len}}, "a metric cannot be called 'step', which rows of a run use for something else"),
        ({"callbacks": Callback()}, r"callbacks is a Callback: pass a list, callbacks=\[...\]"),
        ({"warmup_start": 0.1}, "warmup_start=0.1 has no effect without a warm-up: set warmup_steps too, or drop it"),
        ({"callbacks": [print]}, "is not a distributed.Callback"),
        (
            {"callbacks": [Misspelt()]},
            r"Misspelt.on_train_epoch_end would never be called \(here it is 'on_epoch_end'\)",
        ),
        ({"callbacks": [Misspelt]}, r"callbacks has the class Misspelt instead of an object of it: pass Misspelt\(\)"),
        (
            {"callbacks": [OfLightning()]},
            r"OfLightning.on_train_start is called as on_train_start\(state\), and it takes \(trainer, module",
        ),
        (
            {"training_step": lambda model, batch, index: 0},
            r"called as training_step\(model, batch\), and this one takes \(model, batch, i",
        ),
        (
            {"model": LightningModule()},
            "LightningModule is a LightningModule, whose training_step and configure_optimizers are not called",
        ),
    ],
)
def test_an_argument_of_the_wrong_form_is_answered_with_the_right_one(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(**{"model": lambda: None, **arguments})


def test_a_lightning_module_with_a_step_of_the_trainer_is_taken_as_a_module() -> None:
    Trainer(LightningModule(), loss_fn=print)
    Trainer(LightningModule(), training_step=lambda model, batch, scale=1.0: 0)


def test_a_misspelt_option_of_a_pinned_backend_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"wrap_class is not a setting \(did you mean 'wrap_classes'\?\)"):
        FSDPTrainer(lambda: None, wrap_class="Linear")


def test_batch_sizes_that_contradict_each_other_are_refused_before_fit_if_the_processes_are_known() -> None:
    sizes = {"batch_size": 8, "gradient_accumulation_steps": 2, "global_batch_size": 64, "device": "cpu"}
    said = "global_batch_size=64 is not batch_size=8 x gradient_accumulation_steps=2 x data_parallel_size=2 = 32"
    with pytest.raises(ConfigError, match=said):
        Trainer(print, nproc_per_node=2, **sizes)
    Trainer(print, nproc_per_node=4, **sizes)
    Trainer(print, **sizes)  # the launcher may be asked for four processes
