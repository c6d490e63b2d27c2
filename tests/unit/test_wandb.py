"""Weights & Biases, offline: one run per run directory, with its figures, media and hyperparameters."""

from __future__ import annotations

import struct
from pathlib import Path

import matplotlib.figure
import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, ResourceError, Trainer
from distributed.loggers import Audio, Figure, Image, Table, Text, wandb
from distributed.loggers.wandb import _opened

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 3)
NAMES = ("sample", "words", "note", "tone", "curve")


class Everything(Callback):
    def on_epoch_end(self, state, metrics):
        self.context.log("sample", Image(numpy.zeros((4, 4))))
        self.context.log("words", Table(["word"], [("one",)]))
        self.context.log("note", Text("said"))
        self.context.log("tone", Audio(numpy.zeros(8), 8000))
        self.context.log("curve", Figure(matplotlib.figure.Figure()))


def records(run_dir):
    """(id, what was recorded) of each offline run, in order. A record is a protobuf in a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [
        (path.stem.removeprefix("run-"), [Record.FromString(data) for data in entries(path.read_bytes())])
        for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    ]


def entries(content, block=32768, header=7):
    position, whole = header, b""
    while position + header <= len(content):
        if block - position % block < header:  # the rest of a block is empty
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        whole += content[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # all of it, or its end
            yield whole
            whole = b""


def test_a_run_that_the_service_has_not_ended_yet_is_opened_a_little_later(monkeypatch):
    import wandb

    answers = [RuntimeError("run ID 2c52 is in use"), RuntimeError("run ID 2c52 is in use"), "the run"]

    def init(**arguments):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, arguments

    monkeypatch.setattr(wandb, "init", init)
    assert _opened(id="2c52") == ("the run", {"id": "2c52"})
    answers[:] = [RuntimeError("no space left")]
    with pytest.raises(RuntimeError, match="no space"):
        _opened(id="2c52")
    answers[:] = [RuntimeError("run ID 2c52 is in use")] * 9
    monkeypatch.setattr("distributed.loggers.wandb._ENDS_S", 0.3)
    with pytest.raises(RuntimeError, match="in use"):
        _opened(id="2c52")


def test_two_fits_are_one_offline_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = Trainer(
        lambda: torch.nn.Linear(2, 3), backend="single", device="cpu", epochs=1, batch_size=4, log_every_n_steps=2,
        verbose=False, loggers=["wandb"], callbacks=[Everything()], learning_rate=0.25,
    )  # fmt: skip
    run_dir = Path(trainer.fit(DATA, DATA).run_dir)
    trainer.fit(DATA, DATA)

    (first, rows), (second, _) = records(run_dir)
    assert first == second
    (run,) = (row.run for row in rows if row.HasField("run"))
    assert {item.key: item.value_json for item in run.config.update}["learning_rate"] == "0.25"
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in row.history.item}
        for row in rows
        if row.HasField("history")
    ]
    assert [row["step"] for row in history if "loss" in row] == ["2", "4"]
    assert [row["step"] for row in history if "val_loss" in row] == ["4"]
    kinds = {name: row[f"{name}/_type"] for row in history for name in NAMES if f"{name}/_type" in row}
    assert kinds == {
        "sample": '"image-file"',
        "curve": '"image-file"',
        "words": '"table-file"',
        "note": '"html-file"',
        "tone": '"audio-file"',
    }
    images = run_dir.glob("wandb/offline-run-*/files/media/images/*.png")
    assert {path.name.partition("_")[0] for path in images} == {"sample", "curve"}


def test_without_the_library_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wandb, "is_installed", lambda name: False)
    with pytest.raises(ResourceError, match=r"run pip install 'distributed-trainer\[wandb\]'$"):
        Trainer(torch.nn.Linear(2, 3), loggers=["wandb"])
    assert not (tmp_path / "runs").exists()
