"""Metrics over all samples: what is kept on each rank, how it comes together, and that it is the value of one process."""

from __future__ import annotations

import json
import random
import threading
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from distributed import ConfigError, Trainer, TrainingError, over_all
from distributed.backends import over_all as wholes_module
from distributed.backends._torch import averages
from distributed.backends._torch.averages import _pair
from distributed.backends._torch.over_all import ENGINE, StateMeasure, alone, measure_of
from distributed.backends.over_all import Deferred, Wholes
from distributed.backends.parts import Arguments, Part
from distributed.backends.splitting import vote
from distributed.errors import CheckpointError
from distributed.state import StepResult
from tests.unit.ranks import on_ranks

torchmetrics = pytest.importorskip("torchmetrics")
sklearn_metrics = pytest.importorskip("sklearn.metrics")

N = 53
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(N, 4, generator=GENERATOR, dtype=torch.float64)
Y = (X.sum(1) + torch.randn(N, generator=GENERATOR, dtype=torch.float64) > 0.3).long()
DATA = TensorDataset(X.float(), Y)


def f1(outputs, targets):
    found = outputs.argmax(1)
    return 2.0 * ((found == 1) & (targets == 1)).sum() / ((found == 1).sum() + (targets == 1).sum())


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def perplexity(outputs, targets):
    return F.cross_entropy(outputs, targets).exp()


def trainer_of(tmp_path, name="run", **settings):
    settings = {
        "epochs": 2,
        "batch_size": 8,
        "learning_rate": 0.05,
        "checkpoint_frequency": None,
        "verbose": False,
        **settings,
    }
    return Trainer(lambda: torch.nn.Linear(4, 2), checkpoint_dir=str(tmp_path / name), **settings)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ what is a mean


MEANS = {
    "accuracy": accuracy,
    "number": lambda o, t: accuracy(o, t).item(),
    "loss": F.cross_entropy,
    "each": lambda o, t: F.cross_entropy(o, t, reduction="none"),
    "pair": lambda o, t: ((o.argmax(1) == t).sum(), t.numel()),
    "weighted pair": lambda o, t: (F.cross_entropy(o, t, reduction="sum") * 2, (2 * t.numel())),
    "nearly nothing": lambda o, t: (o[:, 0] - o[:, 0].mean().detach() * 0 - 0.01).mean(),
}
OTHERS = {
    "f1": f1,
    "perplexity": perplexity,
    "rmse": lambda o, t: (o**2).mean().sqrt(),
    "largest": lambda o, t: o.max(),
    "median": lambda o, t: o[:, 0].median(),
    "sum": lambda o, t: o.sum(),
    "roc": lambda o, t: sklearn_metrics.roc_auc_score(t.numpy(), o[:, 1].float().numpy()),
    "labels that count": lambda o, t: F.cross_entropy(o, torch.where(t == 1, -100, t)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [N, 4096])
def test_means_pass_and_others_do_not(dtype, size):
    outputs = torch.randn(size, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    targets = torch.arange(size) % 3 % 2
    assert {name: vote(f, outputs, targets, size, _pair) for name, f in MEANS.items()} == dict.fromkeys(MEANS, True)
    assert {name: vote(f, outputs, targets, size, _pair) for name, f in OTHERS.items()} == dict.fromkeys(OTHERS, False)


def test_what_all_parts_agree_on_proves_nothing():
    outputs, targets = torch.zeros(30, 2), torch.ones(30).long()  # no one is found: F1 is 0 for the whole and all parts
    assert vote(f1, outputs, targets, 30, _pair) is None
    assert vote(accuracy, outputs, targets, 30, _pair) is None
    assert vote(accuracy, outputs[:1], targets[:1], 1, _pair) is None
    assert vote(accuracy, outputs, targets, 7, _pair) is None  # nothing in the batch has rows for seven samples


def test_a_part_that_a_function_refuses_makes_it_no_mean():
    def strict(outputs, targets):
        if len(targets) < 20:
            raise ValueError("too few")
        return accuracy(outputs, targets)

    assert vote(strict, torch.randn(30, 2), torch.arange(30) % 2, 30, _pair) is False


def test_texts_are_cut_by_sample():
    texts = [f"word {i}" for i in range(30)]
    shortest = vote(lambda o, t: float(min(map(len, o))) + len(o), texts, texts, 30, _pair)
    assert shortest is False
    assert vote(lambda o, t: (sum(map(len, o)), len(o)), texts, texts, 30, _pair) is True


def test_a_plain_function_is_found_out_in_the_first_evaluation_and_said_once(tmp_path, capsys):
    calls = {"mean": 0}

    def counted(outputs, targets):
        calls["mean"] += 1
        torch.rand(3)  # draws must not move the run
        return accuracy(outputs, targets)

    asked = trainer_of(tmp_path, metrics={"f1": f1, "right": counted}, epochs=3)
    history = asked.fit(DATA, DATA)
    before = calls["mean"]
    asked.evaluate(DATA)
    assert (
        calls["mean"] == before + 5
    )  # once for all small outputs, and to check it: for all samples, and three parts of them
    plain = trainer_of(tmp_path, "plain", epochs=3).fit(DATA, DATA)
    assert [row["val_loss"] for row in history.rows] == [row["val_loss"] for row in plain.rows]
    trainer = trainer_of(tmp_path, "again", metrics={"f1": f1}, verbose=True, epochs=3)
    trainer.fit(DATA, DATA)
    said = capsys.readouterr()
    text = said.out + said.err
    assert text.count("metric 'f1' gives another value when its batch is split") == 1 and "over_all(f1)" in text
    outputs = trainer.predict(DATA)
    assert trainer.history.rows[-1]["val_f1"] == pytest.approx(float(f1(outputs, Y)), abs=1e-12)


def test_what_an_evaluation_found_out_holds_for_the_fit_after_it_and_is_not_said_again(tmp_path, capsys):
    trainer = trainer_of(tmp_path, metrics={"f1": f1, "right": accuracy}, verbose=True)
    trainer.evaluate(DATA)
    history = trainer.fit(DATA, DATA)
    said = capsys.readouterr()
    assert (said.out + said.err).count("metric 'f1' gives another value when its batch is split") == 1
    measured = trainer.backend.measured
    assert measured.form == {"f1": False}
    once = trainer_of(tmp_path, "once", metrics={"f1": over_all(f1)}).fit(DATA, DATA)
    assert [row["f1"] for row in history.rows] == [
        row["f1"] for row in once.rows
    ]  # in training, from the first epoch on


def test_the_first_value_is_right_where_the_first_batches_prove_nothing(tmp_path):
    """All samples of the first batches are answered alike; the last ones make the difference."""

    def late(outputs, targets):
        return 1.0 if bool((targets == 0).all()) else float(f1(outputs, targets))

    order = torch.argsort(Y, stable=True)
    trainer = trainer_of(tmp_path, metrics={"late": late})
    found = trainer.evaluate(TensorDataset(X[order].float(), Y[order]))
    outputs = trainer.predict(TensorDataset(X[order].float(), Y[order]))
    assert found["late"] == pytest.approx(late(outputs, Y[order]), abs=1e-12)


# ------------------------------------------------------------------ functions


def test_over_all_gets_every_sample_once_in_order(tmp_path):
    seen = []

    def keep(outputs, targets, power):
        seen.append((outputs.clone(), targets.clone(), power))
        return 1.0

    trainer = trainer_of(tmp_path, metrics={"kept": over_all(keep, power=2)})
    trainer.evaluate(DATA)
    ((outputs, targets, power),) = seen
    assert torch.equal(targets, Y) and torch.equal(outputs, trainer.predict(DATA)) and power == 2


def test_functions_of_scikit_learn(tmp_path):
    metrics = {
        "f1": over_all(sklearn_metrics.f1_score, transform="argmax", average="macro"),
        "roc": over_all(sklearn_metrics.roc_auc_score, transform=lambda outputs: outputs[:, 1]),
        "log_loss": over_all(sklearn_metrics.log_loss, transform="softmax"),
    }
    trainer = trainer_of(tmp_path, metrics=metrics)
    found, outputs = trainer.evaluate(DATA), trainer.predict(DATA).numpy()
    assert found["f1"] == sklearn_metrics.f1_score(Y, outputs.argmax(1), average="macro")
    assert found["roc"] == sklearn_metrics.roc_auc_score(Y, outputs[:, 1])
    assert found["log_loss"] == pytest.approx(F.cross_entropy(torch.from_numpy(outputs), Y).item(), rel=1e-5)
    with pytest.raises(ConfigError, match="transform='argmax'"):
        trainer_of(tmp_path, metrics={"f1": sklearn_metrics.f1_score}).evaluate(DATA)


def test_training_covers_the_epoch_so_far_and_may_be_left_out(tmp_path):
    sizes = {"log": [], "val": []}

    def kept(name):
        def count(outputs, targets):
            sizes[name].append(len(targets))
            return float(len(targets))

        return count

    metrics = {"log": over_all(kept("log")), "val": over_all(kept("val"), training=False)}
    history = trainer_of(tmp_path, metrics=metrics, log_every_n_steps=3).fit(DATA, DATA)
    assert sizes["log"] == [24, 48, 53, 53, 16, 40, 53, 53]  # log lines of both epochs, each with its evaluation
    assert sizes["val"] == [53, 53]
    assert [row["log"] for row in history.rows] == [53.0, 53.0] and "val" not in history.rows[0]


def test_updates_that_were_left_out_do_not_count(tmp_path):
    poisoned = X.float().clone()
    poisoned[20] = float("nan")
    count = over_all(lambda outputs, targets: float(len(targets)))
    trainer = trainer_of(tmp_path, metrics={"count": count}, nan_policy="skip", epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = trainer.fit(TensorDataset(poisoned, Y))
    assert history.rows[-1]["count"] == N - 8


def test_early_stopping_and_best_use_it(tmp_path):
    values = iter([0.5, 0.7, 0.6, 0.4, 0.3])
    metrics = {"score": over_all(lambda outputs, targets: next(values), training=False)}
    trainer = trainer_of(
        tmp_path, metrics=metrics, epochs=5, monitor="val_score", monitor_mode="max", early_stopping_patience=2,
        checkpoint_frequency=1,
    )  # fmt: skip
    history = trainer.fit(DATA, DATA)
    assert history.stop_reason == "early_stopping" and len(history.rows) == 4
    assert history.best_metrics["val_score"] == 0.7
    manifests = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    assert max(manifest["monitor_value"] for manifest in manifests) == 0.7


def test_one_of_several_values_is_a_monitor(tmp_path):
    values = iter([0.5, 0.7, 0.6, 0.4, 0.3])
    scores = over_all(lambda outputs, targets: {"recall": next(values), "precision": 0.1}, training=False)
    settings = {"metrics": {"scores": scores}, "monitor_mode": "max", "early_stopping_patience": 2, "epochs": 5}
    history = trainer_of(tmp_path, monitor="val_scores_recall", **settings).fit(DATA, DATA)
    assert history.stop_reason == "early_stopping" and len(history.rows) == 4
    assert history.best_metrics["val_scores_recall"] == 0.7
    values = iter([0.5])
    with pytest.raises(ConfigError, match=r"'val_scores_recal' is not reported \(did you mean 'val_scores_recall'\?\)"):
        trainer_of(tmp_path, "typo", monitor="val_scores_recal", **settings).fit(DATA, DATA)
    with pytest.raises(ConfigError, match=r"'val_score_recall' is not reported"):
        trainer_of(tmp_path, "early", monitor="val_score_recall", **settings).fit(DATA, DATA)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: over_all(3), "pass a function"),
        (lambda: over_all(torchmetrics.MeanSquaredError()), "is not needed"),
        (lambda: over_all(f1, transform="max"), "argmax, softmax, sigmoid"),
        (lambda: trainer_of(Path(), metrics={"f1": torchmetrics.MeanSquaredError}), "is a class"),
        (lambda: trainer_of(Path(), metrics={"f1": 3}), "pass a function"),
    ],
)
def test_what_is_no_metric_is_refused(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_value_that_is_no_number_is_named(tmp_path):
    trainer = trainer_of(
        tmp_path, metrics={"each": over_all(sklearn_metrics.f1_score, transform="argmax", average=None)}
    )
    with pytest.raises(TrainingError, match=r"'each' gave a ndarray of shape \[2\]"):
        trainer.evaluate(DATA)


# ------------------------------------------------------------------ objects


class LargestGap:
    """Has states, and says nothing of them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.largest = -1.0

    def update(self, outputs, targets):
        self.largest = max(self.largest, float((outputs[:, 1] - targets).abs().max()))

    def compute(self):
        return {"gap": self.largest, "twice": 2 * self.largest}


def test_any_object_that_is_updated(tmp_path):
    trainer = trainer_of(tmp_path, metrics={"largest": LargestGap()})
    found, outputs = trainer.evaluate(DATA), trainer.predict(DATA)
    expected = float((outputs[:, 1] - Y).abs().max())
    assert (found["largest_gap"], found["largest_twice"]) == (expected, 2 * expected)
    assert trainer.evaluate(DATA) == found


class Drawing(torch.nn.Module):
    """Draws from every global generator while it is trained."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        if not self.training:
            return self.layer(x)
        return self.layer(F.dropout(x) * (random.random() + numpy.random.random()))


def draw():
    return random.random() + numpy.random.random() + torch.rand(()).item()


class DrawingMetric(LargestGap):
    def update(self, outputs, targets):
        draw()
        super().update(outputs, targets)

    def compute(self):
        return draw()


class DrawingStates(torchmetrics.MeanSquaredError):
    def update(self, outputs, targets):
        draw()
        super().update(outputs[:, 0], targets.float())


DRAWING = {
    "mean": lambda o, t: accuracy(o, t) + 0 * draw(),
    "found out": lambda o, t: f1(o, t) + 0 * draw(),
    "over all": over_all(lambda o, t: draw()),
    "transform": over_all(f1, transform=lambda outputs: outputs + 0 * draw()),
    "object": DrawingMetric(),
    "states": DrawingStates(),
}


def losses_with(metrics, path):
    trainer = Trainer(
        Drawing, metrics=metrics, epochs=2, batch_size=8, log_every_n_steps=1, verbose=False, checkpoint_frequency=None,
        checkpoint_dir=str(path),
    )  # fmt: skip
    return [(row["loss"], row["val_loss"]) for row in trainer.fit(DATA, DATA).rows]


def test_what_a_metric_draws_changes_no_number_of_training(tmp_path, monkeypatch):
    plain = losses_with({}, tmp_path / "plain")
    found = {name: losses_with({name: metric}, tmp_path / name) for name, metric in DRAWING.items()}
    assert found == dict.fromkeys(DRAWING, plain)
    monkeypatch.setattr(averages, "_SMALL_OUTPUTS", 0)  # outputs are large: they are measured at once
    monkeypatch.setattr(wholes_module, "_CHUNK_BYTES", 1)
    assert losses_with({}, tmp_path / "large") == plain
    assert losses_with(DRAWING, tmp_path / "all") == plain


def test_a_step_returns_what_metrics_are_called_with(tmp_path):
    def step(model, batch):
        outputs = model(batch[0])
        return {
            "loss": F.cross_entropy(outputs, batch[1]), "f1": (outputs, batch[1]), "mse": {"preds": outputs[:, 0], "target": outputs[:, 1]},
            "right": accuracy(outputs, batch[1]),
        }  # fmt: skip

    metrics = {"f1": over_all(f1), "mse": torchmetrics.MeanSquaredError()}
    trainer = trainer_of(tmp_path, training_step=step, metrics=metrics)
    history = trainer.fit(DATA, DATA)
    outputs = trainer.predict(DATA)
    row = history.rows[-1]
    assert row["val_f1"] == pytest.approx(float(f1(outputs, Y)), abs=1e-12)
    assert row["val_mse"] == pytest.approx(float(F.mse_loss(outputs[:, 0], outputs[:, 1])), rel=1e-5)
    assert row["val_right"] == pytest.approx(float(accuracy(outputs, Y)), abs=1e-7) and {"f1", "mse"} <= row.keys()
    with pytest.raises(ConfigError, match=r"return them from training_step"):
        trainer_of(tmp_path, "other", training_step=step, metrics=metrics | {"auc": over_all(f1)}).fit(DATA)
    with pytest.raises(ConfigError, match=r"metric 'hits' has no targets .* return its value from training_step"):
        trainer_of(tmp_path, "third", training_step=step, metrics=metrics | {"hits": accuracy}).fit(DATA)


# ------------------------------------------------------------------ several ranks, in one process


class Ranks:
    """What `Wholes` asks of the ranks, over the `reduce` of `on_ranks`."""

    boxes: dict = {}  # noqa: RUF012
    lock = threading.Lock()

    def __init__(self, rank, world, reduce):
        self.rank, self.world_size, self.reduce = rank, world, reduce

    def gather(self, value):
        Ranks.boxes[self.rank] = value
        self.reduce({"met": 1.0})
        found = [Ranks.boxes[rank] for rank in range(self.world_size)]
        self.reduce({"read": 1.0})
        return found

    def broadcast(self, value, src=0):
        return self.gather(value)[src]


def on_wholes(world, metrics, work, warned=None):
    """`work(wholes, rank)` on each of `world` ranks."""

    def run(rank, reduce):
        made = Wholes(
            ENGINE, Ranks(rank, world, reduce), is_presharded=False,
            warn=(warned if warned is not None else []).append, keeping_generators=alone,
        )  # fmt: skip
        for name, metric in metrics.items():
            made.add(name, lambda metric=metric: measure_of(metric, torch.device("cpu"), torch.float64))
        return work(made, rank)

    return on_ranks(world, run)


def feed(wholes, rank, world, begin, end, batch=7, split="train"):
    """The samples from `begin` to `end` in updates of `batch`, the r-th of every `world` on rank r."""
    for start in range(begin, end, batch):
        places = range(start + rank, min(start + batch, end), world)
        parts = {}
        if len(places):
            call = Arguments((SCORES[list(places)], Y[list(places)]), {})
            parts = {name: [Part((start, 0), len(places), call)] for name in wholes.names(split)}
        wholes.keep(split, StepResult([], 0, Deferred(split, [], parts)))


# Probabilities: torchmetrics takes a batch for logits where one of them is not between 0 and 1.
SCORES = torch.randn(N, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64).softmax(1)
METRICS = {
    "f1": over_all(f1),
    "ppl": over_all(perplexity),
    "first": over_all(lambda o, t: float(o[0, 0]) + 1e-3 * float((o[:, 0] * torch.arange(len(o))).sum())),
    "object": torchmetrics.classification.MulticlassF1Score(2, average="macro"),
    "lists": torchmetrics.classification.MulticlassAUROC(2),
    "own": LargestGap(),
    "together": torchmetrics.MetricCollection(
        {
            "precision": torchmetrics.classification.MulticlassPrecision(2),
            "recall": torchmetrics.classification.MulticlassRecall(2),
        }
    ),
}


class Pair(torchmetrics.Metric):
    """Of scores and classes: the least and largest score, and how many there were."""

    def __init__(self):
        super().__init__()
        self.add_state("least", torch.tensor(float("inf")), dist_reduce_fx="min")
        self.add_state("most", torch.tensor(-float("inf")), dist_reduce_fx="max")
        self.add_state("count", torch.tensor(3), dist_reduce_fx="sum")  # is no zero

    def update(self, outputs, targets):
        self.least, self.most = torch.minimum(self.least, outputs.min()), torch.maximum(self.most, outputs.max())
        self.count += len(targets)

    def compute(self):
        return {"range": self.most - self.least, "count": self.count}


class Drift(torchmetrics.Metric):
    """Declares a mean, which ranks with different numbers of samples cannot put together."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, targets):
        self.count += len(targets)
        self.mean = self.mean + (outputs[:, 0] - self.mean).sum() / self.count

    def compute(self):
        return self.mean


class OneColumn(torchmetrics.Metric):
    """The metric of torchmetrics inside gets one column."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def update(self, outputs, targets):
        self.inner.update(outputs[:, 0], targets.to(outputs.dtype))

    def compute(self):
        return self.inner.compute()

    def reset(self):
        super().reset()
        self.inner.reset()


METRICS |= {"pair": Pair(), "drift": Drift(), "driven": OneColumn(torchmetrics.PearsonCorrCoef())}
METRICS["sums"] = OneColumn(torchmetrics.MeanSquaredError())
METRICS["composed"] = 2 * OneColumn(torchmetrics.MeanAbsoluteError())


def measured(wholes, rank, world):
    wholes.begin("train")
    feed(wholes, rank, world, 0, N)
    return wholes.measure("train")


class Relative(torchmetrics.Metric):
    """Has a reduction of its own, and a list that is reduced by none."""

    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx=lambda stacked: stacked.max(0).values)
        self.add_state("sizes", [], dist_reduce_fx=None)

    def update(self, outputs, targets):
        self.largest = torch.maximum(self.largest, outputs.max().to(self.largest))
        self.sizes.append(outputs[:, 0])

    def compute(self):
        return self.largest * torch.cat(self.sizes).sum()


class FromRows(torchmetrics.Metric):
    """Calls another metric with values of its samples, as metrics of regression and retrieval take them."""

    def __init__(self, inner, *columns):
        super().__init__()
        self.inner, self.columns = inner, columns

    def update(self, outputs, targets):
        first, wanted = outputs[:, 0], outputs[:, 0] * 0.3 + targets.to(outputs.dtype)
        indices = {"indexes": torch.arange(len(first)) % 3} if self.columns else {}
        self.inner.update(first, (wanted > 0.6).long() if self.columns else wanted, **indices)

    def compute(self):
        return self.inner.compute()

    def reset(self):
        super().reset()
        self.inner.reset()


_classes = torchmetrics.classification
KINDS = {  # by the reductions of their states, and by what is around them
    "none": FromRows(torchmetrics.PearsonCorrCoef()),
    "concordance": FromRows(torchmetrics.ConcordanceCorrCoef()),
    "explained": FromRows(torchmetrics.ExplainedVariance()),
    "sums": FromRows(torchmetrics.R2Score()),
    "own": Relative(),
    "cat": _classes.MulticlassAveragePrecision(2),
    "binned": _classes.MulticlassAUROC(2, thresholds=20),
    "matrix": _classes.MulticlassCohenKappa(2),
    "calibration": _classes.MulticlassCalibrationError(2),
    "classwise": torchmetrics.wrappers.ClasswiseWrapper(_classes.MulticlassRecall(2, average=None)),
    "minmax": torchmetrics.wrappers.MinMaxMetric(_classes.MulticlassAccuracy(2)),
    "collection": torchmetrics.MetricCollection(
        {"r": _classes.MulticlassRecall(2), "auc": _classes.MulticlassAUROC(2)}
    ),
    "composed": _classes.MulticlassRecall(2) + _classes.MulticlassPrecision(2),
    "in a function": over_all(lambda o, t: updated(_classes.MulticlassF1Score(2), o, t).compute()),
}


def updated(metric, *arguments):
    metric.update(*arguments)
    return metric


@pytest.fixture
def in_a_group(monkeypatch):
    """As torchmetrics sees it, several processes run; talking to them would wait for ever."""

    def wait(*arguments, **named):
        raise AssertionError("one rank alone waits for the others")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("torchmetrics.metric.gather_all_tensors", wait)


@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_of_torchmetrics_is_right_on_any_number_of_ranks_and_asks_none_of_them(world, in_a_group):
    def work(wholes, rank):
        return measured(wholes, rank, wholes.world_size)

    (one,) = on_wholes(1, KINDS, work)
    many = on_wholes(world, KINDS, work)
    assert all(each == many[0] for each in many) and many[0].keys() == one.keys()
    assert len(one) >= len(KINDS) + 3
    assert {name: value for name, value in many[0].items() if abs(value - one[name]) > 1e-6} == {}
    outputs, wanted = SCORES[:, 0], SCORES[:, 0] * 0.3 + Y
    assert one["none"] == pytest.approx(torch.corrcoef(torch.stack([outputs, wanted]))[0, 1].item(), abs=1e-6)
    assert one["in a function"] == pytest.approx(float(f1_of_all()), abs=1e-9)


def f1_of_all():
    with alone():
        return updated(_classes.MulticlassF1Score(2), SCORES, Y).compute()


def failing(outputs, targets):
    return 1 / 0


@pytest.mark.parametrize(
    "metric", [over_all(failing), over_all(f1, transform=lambda outputs: 1 / 0)], ids=["value", "kept"]
)
def test_an_error_of_one_rank_is_raised_by_all_and_names_the_metric(metric):
    def work(wholes, rank):
        try:
            measured(wholes, rank, 3)
        except TrainingError as error:
            return str(error), error.is_echo
        return None

    found = on_wholes(3, {"right": METRICS["f1"], "broken": metric}, work)
    (text,) = {text for text, _ in found}
    assert text.startswith("metric 'broken' failed: ZeroDivisionError: division by zero (") and __file__ in text


def test_what_is_no_number_is_told_with_the_name_of_its_metric(tmp_path):
    trainer = trainer_of(tmp_path, metrics={"both": lambda outputs, targets: {"a": 1.0}})
    with pytest.raises(ConfigError, match=r"metric 'both' gave a dict, .*over_all"):
        trainer.fit(DATA)
    with pytest.raises(ConfigError, match=r"a loss of type str is not"):
        trainer_of(tmp_path, "loss", loss_fn=lambda outputs, targets: "small").fit(DATA)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_any_number_of_ranks_measures_what_one_does(world):
    (one,) = on_wholes(1, METRICS, lambda wholes, rank: measured(wholes, rank, 1))
    many = on_wholes(world, METRICS, lambda wholes, rank: measured(wholes, rank, world))
    assert all(each == many[0] for each in many) and many[0].keys() == one.keys()
    assert len(one) == len(METRICS) + 3
    apart = {name: abs(many[0][name] - value) for name, value in one.items()}
    assert max(apart.values()) < 1e-9, apart
    assert one["f1"] == float(f1(SCORES, Y)) and one["pair_count"] == N + 3
    alike = ("f1", "ppl", "first", "object", "lists", "own_gap", "together_recall", "pair_range", "drift")
    assert {name: apart[name] for name in alike if name != "drift"} == dict.fromkeys(alike[:-1], 0.0)


def test_states_go_by_themselves_where_they_can():
    def kinds(wholes, rank):
        return {name: type(each).__name__ for name, each in wholes._measures["train"].items()}

    (found,) = on_wholes(1, METRICS, kinds)
    by_states = {name for name, kind in found.items() if kind == StateMeasure.__name__}
    assert by_states == {"object", "lists", "sums", "together", "pair", "composed"}


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3), (1, 2), (3, 1)])
def test_a_resume_in_the_middle_of_an_epoch_measures_all_of_it(tmp_path, before, after):
    """Bit for bit with the same number of ranks, and with another one as far as sums of floats allow."""

    def first(wholes, rank):
        wholes.begin("train")
        feed(wholes, rank, before, 0, 21)
        wholes.measure("train")  # a log line in between
        feed(wholes, rank, before, 21, 28)
        saved = wholes.save(tmp_path)
        feed(wholes, rank, before, 28, N)
        return saved, wholes.measure("train")

    def second(wholes, rank):
        wholes.load(tmp_path, json.loads(json.dumps(saved)))
        feed(wholes, rank, after, 28, N)
        return wholes.measure("train")

    (saved, whole), *_ = on_wholes(before, METRICS, first)
    resumed = on_wholes(after, METRICS, second)[0]
    assert whole.keys() == resumed.keys()
    limit = 0.0 if before == after else 1e-9
    assert max(abs(whole[name] - resumed[name]) for name in whole) <= limit
    (path,) = tmp_path.rglob("*.safetensors")
    assert b"cbuiltin" not in path.read_bytes() and path.read_bytes()[8:9] == b"{"


def test_a_metric_that_is_new_waits_for_the_next_epoch(tmp_path):
    def first(wholes, rank):
        wholes.begin("train")
        feed(wholes, rank, 1, 0, 28)
        return wholes.save(tmp_path)

    (saved,) = on_wholes(1, {"f1": METRICS["f1"]}, first)

    def second(wholes, rank):
        wholes.load(tmp_path, saved)
        feed(wholes, rank, 1, 28, N)
        part = wholes.measure("train")
        wholes.begin("train")
        feed(wholes, rank, 1, 0, N)
        return part, wholes.measure("train")

    ((part, whole),) = on_wholes(1, {"f1": METRICS["f1"], "ppl": METRICS["ppl"]}, second)
    assert part == {"f1": float(f1(SCORES, Y))} and whole.keys() == {"f1", "ppl"}


def test_a_damaged_file_is_told(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "train.safetensors").write_bytes(b"no tensors" * 9)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        on_wholes(1, {"f1": METRICS["f1"]}, lambda wholes, rank: wholes.load(tmp_path, {"open": ["f1"]}))


def test_large_outputs_are_sent_in_pieces_and_warned_of_once(monkeypatch):
    monkeypatch.setattr(wholes_module, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(wholes_module, "_WARN_BYTES", 256)
    warned: list[str] = []

    def work(wholes, rank):
        first = measured(wholes, rank, 2)
        return first == measured(wholes, rank, 2), first["f1"]

    assert on_wholes(2, METRICS, work, warned) == [(True, float(f1(SCORES, Y)))] * 2
    assert len(warned) == 1 and "GiB" in warned[0] and "transform=" in warned[0]


def test_a_metric_that_is_dropped_keeps_no_outputs():
    def work(wholes, rank):
        wholes.begin("val")
        feed(wholes, rank, 1, 0, 21, split="val")
        late = StepResult([], 0, Deferred("val", [], {"f1": [Part((99, 0), N, Arguments((SCORES, Y), {}))]}))
        pending = list(wholes._pending["val"])
        before = wholes._pending_bytes["val"]
        wholes.drop("f1")
        names = {name for result in pending for name in result.deferred.parts}
        halved = wholes._pending_bytes["val"] == before // 2
        wholes.keep("val", late)  # an engine that had it in its step already
        alone = dict(late.deferred.parts)
        wholes.measure("val")
        kept = wholes._kept_bytes["val"]
        wholes.drop("ppl")
        return names, halved, alone, kept > wholes._kept_bytes["val"] == 0

    metrics = {"f1": METRICS["f1"], "ppl": METRICS["ppl"]}
    assert on_wholes(1, metrics, work) == [({"ppl"}, True, {}, True)]


def test_what_a_transform_keeps_is_all_that_is_kept():
    kept = over_all(lambda outputs, targets: float(outputs.numel()), transform="argmax")

    def work(wholes, rank):
        wholes.begin("val")
        feed(wholes, rank, 1, 0, N, split="val")
        value = wholes.measure("val")
        return value, wholes._kept_bytes["val"]

    ((value, size),) = on_wholes(1, {"kept": kept}, work)
    assert value == {"kept": float(N)} and size == 2 * 8 * N  # two whole numbers for each sample


def test_halves_are_summed_in_float32():
    measure = measure_of(torchmetrics.MeanMetric(), torch.device("cpu"), None)
    for start in range(0, 4096, 64):
        values = torch.full((64,), 1.0 + 1 / 128, dtype=torch.bfloat16)
        measure.absorb(Part((start, 0), 64, Arguments((values,), {})))
    assert float(measure.value([], [measure.state()])) == pytest.approx(1.0 + 1 / 128, abs=1e-6)


def test_outputs_of_a_model_with_a_class_of_its_own(tmp_path):
    """Hugging Face's outputs: functions get their fields, objects get the scores."""
    transformers = pytest.importorskip("transformers")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            output = transformers.modeling_outputs.SequenceClassifierOutputWithPast
            return output(logits=self.layer(x), past_key_values=object())  # of no use, and nothing could store it

    metrics = {
        "by_function": over_all(lambda outputs, targets: f1(outputs.logits, targets)),
        "recall": torchmetrics.classification.MulticlassRecall(2, average="micro"),
        "by_word": over_all(sklearn_metrics.f1_score, transform="argmax"),
    }
    trainer = Trainer(
        Net, metrics=metrics, loss_fn=lambda o, t: F.cross_entropy(o.logits, t), verbose=False, batch_size=8, epochs=1
    )
    row = trainer.fit(DATA, DATA).rows[-1]
    outputs = trainer.predict(DATA)["logits"]
    assert row["val_by_function"] == pytest.approx(float(f1(outputs, Y)), abs=1e-7)
    assert row["val_by_word"] == pytest.approx(float(f1(outputs, Y)), abs=1e-7)
    assert row["val_recall"] == pytest.approx(float(accuracy(outputs, Y)), abs=1e-7)
