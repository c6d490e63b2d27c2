"""What a Trainer is given is looked at before anything starts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

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
        ({"loss_fn": 3}, "loss_fn=3 is a int: pass a function"),
        ({"training_step": 3}, "training_step=3 is a int: pass a function"),
        ({"metrics": {1}}, r"metrics is a set: pass a list, metrics=\[.accuracy.\], or names and functions"),
        ({"metrics": {"acc": 3}}, r"metrics\['acc'\]=3 is a int: pass a function"),
        ({"metrics": {"step": len}}, "a metric cannot be called 'step', which rows of a run use for something else"),
        ({"callbacks": Callback()}, r"callbacks is a Callback: pass a list, callbacks=\[...\]"),
        ({"warmup_start": 0.1}, "warmup_start=0.1 has no effect without a warm-up: set warmup_steps too, or drop it"),
        ({"callbacks": [print]}, "is not a distributed.Callback"),
        ({"callbacks": [Misspelt()]}, r"Misspelt.on_train_epoch_end would never be called \(did you mean 'on_\w+'\?\)"),
    ],
)
def test_an_argument_of_the_wrong_form_is_answered_with_the_right_one(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(lambda: None, **arguments)


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
