"""`fit` takes arrays as Keras's `fit` does, and refuses what it does not take with the fix."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, Trainer
from distributed.backends.arrays import ArrayData
from distributed.backends.exporting import inputs_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(21, 4, generator=GENERATOR)
Y = torch.randint(0, 3, (21,), generator=GENERATOR)


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(1, 3), torch.nn.Linear(3, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.left(left) + self.right(right)


def trained(make: Any, *data: Any, **arguments: Any) -> list[Any]:
    settings = {name: arguments.pop(name) for name in ("loss_fn", "metrics", "dtype") if name in arguments}
    trainer = Trainer(make, batch_size=8, epochs=2, verbose=False, checkpoint_frequency=None, **settings)
    history = trainer.fit(*data, **arguments)
    rows = [{k: v for k, v in row.items() if k != "samples_per_second"} for row in history.rows]
    return [rows, [parameter.tolist() for parameter in trainer.model.parameters()]]


def test_arrays_are_the_same_data_as_a_tensor_dataset(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    data, linear = TensorDataset(X, Y), lambda: torch.nn.Linear(4, 3)
    expected = trained(linear, data, data)
    arrays = X.numpy().astype("float64"), Y.numpy()  # as Keras does, fit converts them to the type of the run
    assert trained(linear, x=arrays[0], y=arrays[1], validation_data=arrays) == expected
    assert trained(linear, x=X, y=Y, validation_data=data, batch_size=8, verbose=0) == expected
    assert trained(linear, x=data, validation_data=(X, Y), shuffle=True) == expected
    assert trained(linear, x=X, y=Y, validation_data=(X, Y), shuffle=False) != expected
    assert trained(linear, x=X, y=Y.int(), validation_data=(X, Y.to(torch.int16))) == expected
    in_float64 = trained(linear, TensorDataset(X, Y), dtype="float64")
    assert trained(linear, x=X, y=Y, dtype="float64") == in_float64


def test_several_inputs_are_the_arguments_of_a_torch_module(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    expected = trained(Pair, TensorDataset(X[:, :1], X[:, 1:], Y))
    assert trained(Pair, x=(X[:, :1], X[:, 1:]), y=Y) == expected
    named = {"right": X[:, 1:], "left": X[:, :1]}
    assert trained(Pair, x=named, y=Y, loss_fn="cross_entropy", metrics=["accuracy"]) == expected


def test_losses_and_metrics_of_torch_by_name(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    functional, target = torch.nn.functional, X[:, :3]
    linear = lambda: torch.nn.Linear(4, 3)  # noqa: E731
    for name, function in {
        "mse": functional.mse_loss, "l1": functional.l1_loss, "bce_with_logits": functional.binary_cross_entropy_with_logits
    }.items():  # fmt: skip
        y = target.sigmoid() if name == "bce_with_logits" else target
        rows, weights = trained(linear, x=X, y=y, loss_fn=name, metrics=["l1", name] if name != "l1" else ["l1"])
        assert [rows, weights] == trained(
            linear, x=X, y=y, loss_fn=function, metrics={"l1": functional.l1_loss, name: function}
        )
        assert rows[-1][name] == pytest.approx(rows[-1]["loss"], rel=1e-5)


class Named(torch.nn.Module):
    """Outputs in a dict, as many models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: Any, labels: Any = None) -> Any:
        scores = self.linear(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_the_accuracy_by_name_counts_what_the_loss_predicts(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    single = {"batch_size": 8, "epochs": 1, "verbose": False, "checkpoint_frequency": None, "metrics": ["accuracy"]}
    flat = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    likely = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
    is_one, both = (X[:, 0] > 0).float(), (X[:, :2] > 0).float()
    for model, y, loss_fn, threshold in (
        (torch.nn.Linear(4, 1), is_one[:, None], "bce_with_logits", 0.0),
        (flat, is_one, torch.nn.BCEWithLogitsLoss(), 0.0),
        (torch.nn.Linear(4, 2), both, "bce_with_logits", 0.0),
        (likely, is_one[:, None], torch.nn.BCELoss(), 0.5),
    ):
        history = Trainer(model, loss_fn=loss_fn, **single).fit(x=X, y=y, validation_data=(X, y))
        expected = ((model(X) > threshold) == y).float().mean().item()
        assert history.rows[-1]["val_accuracy"] == pytest.approx(expected) and 0 < expected < 1
        assert 0 <= history.rows[-1]["accuracy"] <= 1
    model = Named()
    named = {**single, "metrics": ["accuracy", "cross_entropy"]}
    row = Trainer(model, **named).fit(x={"x": X}, y=Y, validation_data=({"x": X}, Y)).rows[-1]
    assert row["val_accuracy"] == pytest.approx((model.linear(X).argmax(1) == Y).float().mean().item())
    assert row["val_cross_entropy"] == pytest.approx(row["val_loss"])


@pytest.mark.parametrize(
    ("model", "y", "said"),
    [
        (torch.nn.Linear(4, 1), X[:, :1], r"outputs \[8, 1\] with float32 targets \[8, 1\], and it needs scores"),
        (torch.nn.Linear(4, 3), Y[:, None], r"outputs \[8, 3\] with int64 targets \[8, 1\], and it needs scores"),
        (torch.nn.LSTM(4, 3), Y, "metrics='accuracy' got outputs of type tuple: let the outputs be a tensor"),
    ],
)
def test_an_accuracy_that_cannot_be_is_refused(tmp_path: Any, monkeypatch: Any, model: Any, y: Any, said: str) -> None:
    monkeypatch.chdir(tmp_path)

    def loss_fn(outputs: Any, targets: Any) -> Any:
        return (outputs[0] if isinstance(outputs, tuple) else outputs).mean()

    with pytest.raises(ConfigError, match=said):
        Trainer(model, loss_fn=loss_fn, metrics=["accuracy"], batch_size=8, verbose=False).fit(x=X, y=y)


def test_the_classes_weigh_as_in_keras() -> None:
    weights = {0: 2.0, 2: 0.5}
    one_hot = numpy.eye(3)[[0, 1, 2]]
    for y in ([0, 1, 2], [[0], [1], [2]], one_hot, [0.0, 1.0, 2.0]):
        data = ArrayData(numpy.zeros((3, 1)), numpy.asarray(y), class_weight=weights)
        assert data.is_weighted and data.parts[2].tolist() == [2.0, 1.0, 0.5]


def test_the_inputs_of_a_batch_of_arrays_are_an_example_for_export() -> None:
    pair, named = (X[:, :1], X[:, 1:]), {"left": X[:, :1], "right": X[:, 1:]}
    examples = [inputs_of(Pair(), ArrayData(x, Y).parts) for x in (X, pair, named)]
    assert [len(example) for example in examples] == [1, 2, 2] and examples[2].keys() == named.keys()


def test_a_table_is_read_as_an_array() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    data = ArrayData(table, table["a"])
    assert data.parts[0].tolist() == [[1.0, 3.0], [2.0, 4.0]] and data[1][1] == 2.0


class Counted(Callback):
    def __init__(self) -> None:
        self.starts = 0

    def on_train_start(self, state: Any) -> None:
        self.starts += 1


def test_callbacks_of_a_fit_are_those_of_this_fit_alone(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    always, once = Counted(), Counted()
    trainer = Trainer(torch.nn.Linear(4, 3), callbacks=[always], batch_size=8, verbose=False, checkpoint_frequency=None)
    trainer.fit(x=X, y=Y, callbacks=[once])
    trainer.fit(x=X, y=Y)
    assert (always.starts, once.starts) == (2, 1) and trainer.callbacks == [always]


ROWS = numpy.zeros((4, 2))


@pytest.mark.parametrize(
    ("data", "arguments", "said"),
    [
        ((), {}, "fit() got no training data: pass a DataLoader or a dataset, or arrays as x and y"),
        ((ROWS, ROWS), {}, "fit() takes data sets by position, and got two arrays: write fit(x=inputs, y=targets)"),
        (([1],), {"x": ROWS}, "train_data and x are both training data: drop one of them"),
        (([1],), {"class_weight": {0: 1}}, "class_weight belongs to arrays, but train_data is a list: pass x and y as arrays"),
        ((), {"x": ROWS, "y": ROWS[:3]}, "x, y and sample_weight have 3 and 4 samples: pass as many of each"),
        ((), {"x": [1, 2], "y": ROWS}, "fit(x=): a int is not an array: pass an array or tensor"),
        ((), {"x": ROWS, "y": "labels"}, "fit(y=): str is not a data set"),
        ((), {"x": numpy.array(["a", "b"])}, "x has elements of type <U1: pass numbers"),
        ((), {"x": numpy.float32(3)}, "x of shape [] has no samples"),
        ((), {"x": (), "y": ROWS}, "x is empty: pass an array"),
        ((), {"x": ROWS, "sample_weight": ROWS[:, 0]}, "sample_weight weighs the loss of targets, and there are none"),
        ((), {"x": ROWS, "class_weight": {0: 1}}, "class_weight needs the targets as one array: pass y"),
        ((), {"x": ROWS, "y": ROWS, "class_weight": [1, 2]}, "class_weight is a list: pass class_weight={0: 1.0, 1: 5.0}"),
        ((), {"x": ROWS, "y": ROWS, "class_weight": {"a": 1}}, "class_weight['a']=1 is not a number of 0 or more"),
        ((), {"x": ROWS, "y": ROWS, "class_weight": {0: -1}}, "class_weight[0]=-1 is not a number of 0 or more"),
        (
            (),
            {"x": ROWS, "y": ROWS, "class_weight": {0: 1}, "sample_weight": ROWS[:, 0]},
            "class_weight and sample_weight both weigh the samples: multiply them, and drop one",
        ),
        (
            (),
            {"x": ROWS, "y": numpy.zeros((4, 5, 2)), "class_weight": {0: 1}},
            "class_weight needs one class per sample, and y has the shape [4, 5, 2]: pass sample_weight instead",
        ),
        (
            (),
            {"x": ROWS, "y": ROWS[:, 0], "class_weight": {0: 2}},
            "sample_weight and class_weight weigh the loss of a Keras model, and this model is a torch module: pass loss_fn=",
        ),
        (([1], [1]), {"validation_data": [1]}, "val_data and validation_data are both validation data: drop one of them"),
        (
            (),
            {"x": ROWS, "y": ROWS, "validation_data": (ROWS, [0, 1])},
            "fit(y=): a int is not an array: pass an array or tensor",
        ),
        (
            (),
            {"x": ROWS, "y": ROWS, "validation_split": 0.2},
            "validation_split is not a setting, because data goes to trainer.fit(): split the arrays, and pass"
            " validation_data=(x_val, y_val)",
        ),
        (([1],), {"initial_epoch": 3}, "initial_epoch is not a setting: use resume_from_checkpoint"),
        (([1],), {"steps_per_epoch": 3}, "steps_per_epoch is not a setting: use max_steps"),
        (([1],), {"validation_steps": 3}, "validation_steps is not a setting: use max_validation_batches"),
        (([1],), {"validation_freq": 3}, "validation_freq is not a setting: use validate_every_n_steps"),
        (([1],), {"workers": 3}, "workers is not a setting, because it belongs to the loader"),
        (([1],), {"epoch": 3}, "epoch is not a setting (did you mean 'epochs'?)"),
        (([1],), {"seed": 3}, "fit() does not take seed: set it in the constructor, Trainer(..., seed=3)"),
        (([1],), {"verbose": 3}, "verbose=3 is not a valid choice: pass True or False, or Keras's 0, 1, 2 or 'auto'"),
        (([1],), {"callbacks": [print]}, "is not a distributed.Callback"),
    ],
)  # fmt: skip
def test_what_fit_does_not_take_is_one_line_with_the_fix(
    data: Any, arguments: Any, said: str, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        Trainer(torch.nn.Linear(2, 2), verbose=False).fit(*data, **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"loss_fn": "cross_entrop"},
            "loss_fn='cross_entrop' is not a name for torch modules (did you mean 'cross_entropy'?): choose one of"
            " cross_entropy, mse, l1, bce_with_logits, or pass a function (outputs, targets)",
        ),
        (
            {"metrics": ["acuracy"]},
            "metrics['acuracy']='acuracy' is not a name for torch modules (did you mean 'accuracy'?)",
        ),
        ({"metrics": {"own": "mse", "loss": "mse"}}, "a metric cannot be called 'loss'"),
        ({"metrics": ["mse", "mse"]}, "metrics has two entries called 'mse': give them names"),
        ({"metrics": [lambda o, t: o]}, "metrics has a function without a name: pass a list, metrics="),
        ({"metrics": "accuracy"}, "metrics is a str: pass a list"),
        (
            {"metrics": ["mse"], "training_step": lambda model, batch: 0},
            "metrics['mse']='mse' has no outputs to measure with a training_step: let the step return",
        ),
    ],
)
def test_a_wrong_name_of_a_loss_or_metric_is_answered(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(torch.nn.Linear(2, 2), **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)
