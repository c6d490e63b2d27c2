"""The text files of a run on a full disk: they may lose lines, the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import ConfigError, Logger, Trainer
from distributed.checkpoints.durable import replace_text
from distributed.loggers.files import MetricsFile
from distributed.loggers.spool import Spool
from distributed.state import TrainState


@pytest.fixture
def disk(monkeypatch):
    """`is_full`: nothing can be opened to write then."""
    real = Path.open

    class Disk:
        is_full = True

    def opened(path, mode="r", *rest, **more):
        if Disk.is_full and mode[0] != "r":
            raise OSError(28, os.strerror(28))
        return real(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", opened)
    return Disk


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_of_metrics_are_lost_until_there_is_room(tmp_path, disk, caplog):
    path = tmp_path / "metrics.jsonl"
    logger = MetricsFile(path)
    logger.on_train_start(TrainState())
    for step in (1, 2, 3, 4):
        disk.is_full = step < 3
        logger.on_log(TrainState(step=step), "train", {"loss": 1.0})
    logger.on_train_end(TrainState())
    assert steps(path) == [3, 4]
    assert [record.message.count("No space left") for record in caplog.records] == [1]


def test_a_restart_forgets_later_rows_without_room_for_a_copy(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "epoch": 0, "split": "train"}) for step in (1, 2, 3, 4)]
    disk.is_full = False
    path.write_text("\n".join(rows) + '\n{"step": 5, "ep')
    disk.is_full = True
    MetricsFile(path).on_train_start(TrainState(step=2))
    assert steps(path) == [1, 2]


def test_a_small_file_is_replaced_whole_or_stays(tmp_path, disk, caplog):
    path = tmp_path / "config.yaml"
    disk.is_full = False
    replace_text(path, "old")
    disk.is_full = True
    replace_text(path, "new")
    assert path.read_text() == "old"
    assert "config.yaml cannot be written: No space left on device" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


def test_a_disk_that_is_full_when_a_logger_begins_is_named(tmp_path, monkeypatch):
    class Mine(Logger):
        pass

    def full(spool):
        raise OSError(28, os.strerror(28))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Spool, "open", full)
    data = TensorDataset(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(
        ConfigError, match=r"loggers/Mine\.jsonl, the queue of the logger Mine, cannot be written \(No space left"
    ):
        Trainer(torch.nn.Linear(1, 1), backend="single", device="cpu", loggers=[Mine()], verbose=False).fit(data)
