"""Outputs of `predict` in files: what is read back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import CheckpointError, ConfigError, Trainer, load_predictions
from distributed.training import predictions

INPUTS = torch.arange(30, dtype=torch.float32).reshape(10, 3)


class Answers(torch.nn.Module):
    """Returns what `answer` makes of a batch."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.answer = answer

    def forward(self, inputs: Any) -> Any:
        return self.answer(inputs)


def trainer_of(answer: Any) -> Trainer:
    return Trainer(Answers(answer), batch_size=4, device="cpu", backend="single", verbose=False)


def several(inputs: Any) -> Any:
    return {
        "rows": inputs * 2,
        "half": (inputs[:, 0].to(torch.bfloat16), None),
        "pairs": torch.stack([inputs, -inputs], 1).flatten(0, 1),
        "words": [f"word {int(each)}" for each in inputs[:, 0]],
        "array": inputs.numpy().astype("int32"),
        "nothing": {},
        "boxes": [torch.ones(1 + int(each) % 3, 2) * each for each in inputs[:, 0]],
    }


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(type(one) is type(other) and numpy.array_equal(one, other))


@pytest.mark.parametrize("most", [1 << 14, 5, 1])
def test_files_hold_what_predict_returns(most: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_MAX_SAMPLES", most)
    trainer = trainer_of(several)
    out = trainer.predict(TensorDataset(INPUTS, INPUTS), out=tmp_path / "out")
    assert out == tmp_path / "out"
    found, wanted = load_predictions(out), trainer.predict(TensorDataset(INPUTS, INPUTS))
    assert found.rows is found["rows"]
    assert alike(found, dict(wanted))
    assert len(list(out.glob("rank-*"))) == {1 << 14: 1, 5: 2, 1: 3}[most]


def test_the_samples_of_several_ranks_are_put_in_order(tmp_path: Any) -> None:
    for is_by_rank, counts in ((False, (4, 3, 3)), (True, (3, 4, 3))):
        path = tmp_path / str(is_by_rank)
        path.mkdir()
        for rank, count in enumerate(counts):
            rows = torch.arange(10)[rank::3] if not is_by_rank else torch.arange(count) + sum(counts[:rank])
            indices = rows if not is_by_rank else torch.arange(count)
            halves = slice(0, 2), slice(2, None)
            for number, half in enumerate(halves):
                piece = predictions._Piece(indices[half].numpy(), rows[half])
                predictions._write(path / predictions._name(rank, number), [piece])
        content = {"format": 1, "files": [2] * 3, "samples": list(counts), "is_by_rank": is_by_rank}
        predictions._complete(path, content)
        assert load_predictions(path).tolist() == list(range(10))


REFUSED = [
    (
        lambda inputs: {"loss": inputs.mean(), "out": inputs},
        r"outputs.loss\[0\] is a Tensor without a row for each of 4 samples",
    ),
    (lambda inputs: inputs.mean(0), r"outputs\[0\] is a Tensor without a row for each of 4 samples"),
    (lambda inputs: [object() for _ in inputs], r"outputs\[0\] is a builtins.object: predict\(out"),
    (
        lambda inputs: {"a": inputs.to_sparse()},
        r"outputs\.a is a tensor of the layout torch\.sparse_coo: return its to_dense\(\)",
    ),
]


@pytest.mark.parametrize(("answer", "message"), REFUSED)
def test_outputs_that_the_files_cannot_hold_are_refused(answer: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        trainer_of(answer).predict(INPUTS, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"has no predictions\.json: .* predict has not finished"):
        load_predictions(tmp_path / "out")


def test_what_exists_is_refused_or_replaced(tmp_path: Any) -> None:
    trainer, out = trainer_of(lambda inputs: inputs), tmp_path / "out"
    trainer.predict(INPUTS, out=out)
    with pytest.raises(ConfigError, match=r"out already exists: name another path, or replace it with force=True"):
        trainer.predict(INPUTS + 1, out=out)
    trainer.predict(INPUTS + 1, out=out, force=True)
    (out / "predictions.json").unlink()  # as after a run that was killed
    trainer.predict(INPUTS + 2, out=out)
    assert torch.equal(load_predictions(out), INPUTS + 2)
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match="has other files than"):
        trainer.predict(INPUTS, out=out, force=True)
    with pytest.raises(ConfigError, match="is not a directory"):
        trainer.predict(INPUTS, out=out / "notes.txt")
    with pytest.raises(ConfigError, match="force=True has no effect without out="):
        trainer.predict(INPUTS, force=True)
    with pytest.raises(ConfigError, match="not on 's3://bucket/out'"):
        trainer.predict(INPUTS, out="s3://bucket/out")
    with pytest.raises(ConfigError, match=r"predict\(out=5\): name a directory, as a str or a Path"):
        trainer.predict(INPUTS, out=5)


def test_batches_of_different_structures_are_refused(tmp_path: Any) -> None:
    trainer = trainer_of(lambda inputs: {"last": inputs} if len(inputs) < 4 else None)
    with pytest.raises(ConfigError, match="the outputs of two batches have different structures"):
        trainer.predict(INPUTS, out=tmp_path / "out")


def test_a_damaged_directory_is_an_error_in_one_line(tmp_path: Any) -> None:
    out = trainer_of(lambda inputs: inputs).predict(INPUTS, out=tmp_path / "out")
    (file,) = out.glob("rank-*")
    content = json.loads((out / "predictions.json").read_text())
    for wrong, message in (
        ({"samples": [11]}, "does not hold each sample once"),
        ({"files": [2]}, "rank-00000-000001.safetensors is missing"),
        ({"files": []}, "has 0 files, and numbers of samples of 1"),
        ({"format": 2}, "has format 2, and this version of the package knows 1"),
        ({"samples": "no"}, "is not a manifest of predictions"),
    ):
        (out / "predictions.json").write_text(json.dumps({**content, **wrong}))
        with pytest.raises(CheckpointError, match=message):
            load_predictions(out)
    (out / "predictions.json").write_text(json.dumps(content))
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_predictions(out)
