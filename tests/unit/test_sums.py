"""The sums of an epoch are the same bits wherever log lines, checkpoints and resumes cut it."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer
from distributed.backends.sums import added

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(97, 4, generator=GENERATOR)
Y = (X.sum(1) > 0.2).long()


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, state, result):
        if state.step == self.step:
            self.context.stop("enough")


def norm(outputs, targets):
    return outputs.abs().mean()


def step(model, batch):
    outputs = model(batch[0])
    return {
        "loss": F.cross_entropy(outputs, batch[1]),
        "norm": outputs.abs().mean(),
        "part": (outputs.sum(), 2 * len(outputs)),
    }


def rows(path, stop_at=None, **settings):
    trainer = Trainer(
        lambda: torch.nn.Linear(4, 2), callbacks=[StopAt(stop_at)], epochs=2, batch_size=6, learning_rate=0.05, verbose=False, dtype="float64",
        checkpoint_dir=str(path), **settings,
    )  # fmt: skip
    history = trainer.fit(DataLoader(TensorDataset(X, Y), shuffle=True, batch_size=6))
    assert (history.stop_reason == "enough") == (stop_at is not None)
    return [{name: value for name, value in row.items() if name != "samples_per_second"} for row in history.rows]


@pytest.mark.parametrize(
    "given", [{"metrics": {"norm": norm}}, {}, {"training_step": step}], ids=["function", "accuracy", "training_step"]
)
def test_a_resume_at_any_step_gives_the_rows_of_one_run(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    whole = rows(tmp_path / "whole", log_every_n_steps=7, **given)
    assert len(whole) == 2 and ({"norm"} if given else {"accuracy"}) <= whole[0].keys()
    for stop_at in (13, 24):
        rows(tmp_path / str(stop_at), stop_at, log_every_n_steps=7, **given)
        resumed = rows(tmp_path / str(stop_at), log_every_n_steps=7, resume_from_checkpoint=True, **given)
        assert resumed == whole, stop_at
    assert rows(tmp_path / "others", log_every_n_steps=2, checkpoint_every_n_steps=3, **given) == whole


def test_ranks_are_added_step_by_step_and_one_after_the_other():
    generator = random.Random(0)
    ranks = [
        {
            name: numpy.array([[generator.random(), 1.0 + rank] for _ in range(9)])
            for name in ("loss", "norm")[: 1 + rank % 2]
        }
        for rank in range(5)
    ]
    whole = added(ranks)
    assert list(whole) == ["loss", "norm"] and len(whole["loss"]) == 9
    for cut in range(1, 9):
        parts = [
            added([{n: rows[part] for n, rows in each.items()} for each in ranks])
            for part in (slice(cut), slice(cut, 9))
        ]
        assert {name: parts[0][name] + parts[1][name] for name in whole} == whole
    assert whole["norm"][0] == (ranks[1]["norm"][0, 0] + ranks[3]["norm"][0, 0], 6.0)
