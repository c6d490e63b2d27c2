"""A logger of one's own is one file and one entry of the registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.errors import ConfigError
from distributed.loggers import registry
from distributed.loggers.registry import end_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import close_results

TOY = """
import json

from distributed.errors import ConfigError
from distributed.loggers.base import Tracker, hyperparameters

class Toy(Tracker):
    def __init__(self, fit):
        self._fit, self._path = fit, fit.run.path / "toy.jsonl"
        self._write("begin", hyperparameters(fit))

    def on_log(self, state, split, metrics):
        self._write(f"{split} {state.step}", dict(metrics))

    def on_train_end(self, state):
        self._write("end", state.step)

    def close(self):
        self._write("close", (self._fit.run.path / "result.json").exists())

    def _write(self, what, value):
        with self._path.open("a") as file:
            file.write(json.dumps([what, value]) + "\\n")

def make(fit):
    return [Toy(fit)] if fit.context.is_main_process else []

def check(merged):
    if merged.config.seed == 13:
        raise ConfigError("seed=13 is no seed for the toy: choose another")

def end(run, code):
    with (run.path / "toy.jsonl").open("a") as file:
        file.write(json.dumps(["killed", code]) + "\\n")
"""
DATA = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16) % 3)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Register the toy, and yield the working directory."""
    (tmp_path / "toy_logger.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    entry = registry.LoggerEntry(
        "toy", "toy_logger:make", check="toy_logger:check", record="toy.jsonl", end="toy_logger:end"
    )
    monkeypatch.chdir(tmp_path)
    registry.LOGGERS.append(entry)
    yield tmp_path
    registry.LOGGERS.remove(entry)


def lines(run_dir: Path) -> dict[str, object]:
    return dict(json.loads(line) for line in (run_dir / "toy.jsonl").read_text().splitlines())


def trainer(**settings: object) -> Trainer:
    return Trainer(
        lambda: torch.nn.Linear(2, 3), backend="single", device="cpu", batch_size=4, log_every_n_steps=2, verbose=False, **settings
    )  # fmt: skip


def test_it_gets_the_hyperparameters_the_log_lines_and_the_end(toy: Path) -> None:
    history = trainer(learning_rate=0.25, config={"depth": 3}).fit(DATA, DATA)

    found = lines(Path(history.run_dir))
    assert list(found) == ["begin", "train 2", "train 4", "val 4", "end", "close"]
    begin = found["begin"]
    assert isinstance(begin, dict)
    assert {name: begin[name] for name in ("learning_rate", "depth", "backend", "global_batch_size")} == {
        "learning_rate": 0.25, "depth": 3, "backend": "single", "global_batch_size": 4,
    }  # fmt: skip
    assert found["end"] == 4 and found["close"] is True
    logged = [json.loads(line) for line in (Path(history.run_dir) / "metrics.jsonl").read_text().splitlines()]
    first = found["train 2"]
    assert isinstance(first, dict) and first["loss"] == logged[0]["loss"]  # what the other loggers got


def test_its_settings_are_checked_before_anything_starts(toy: Path) -> None:
    with pytest.raises(ConfigError, match="seed=13 is no seed for the toy"):
        trainer(seed=13).fit(DATA)
    assert not (toy / "runs").exists()


@pytest.mark.parametrize(("code", "told"), [(1, True), (143, True), (0, False)])
def test_the_launcher_tells_it_of_workers_that_could_not(toy: Path, code: int, told: bool) -> None:
    run = RunDirectory(toy / "run")
    run.path.mkdir()
    (run.path / "toy.jsonl").touch()

    close_results(run, code, "rank 0 was killed", end_elsewhere)

    assert lines(run.path) == ({"killed": code} if told else {})
