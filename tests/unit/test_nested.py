"""Batches of every kind are moved whole, and stay what they were."""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from distributed.backends._torch.nested import move


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    name: str
    length: int = dataclasses.field(default=3, init=False)


class Triple(typing.NamedTuple):
    x: Any
    y: Any
    z: str


class View(Mapping[str, Any]):
    """Cannot be built from a dict."""

    def __init__(self) -> None:
        pass

    def __getitem__(self, key: str) -> Any:
        return {"x": torch.ones(2)}[key]

    def __iter__(self) -> Any:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def doubled(batch: Any) -> Any:
    return move(batch, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize(
    ("batch", "inner"),
    [
        ([torch.ones(2)], lambda batch: batch[0]),
        (Triple(torch.ones(2), None, "z"), lambda batch: batch.x),
        (Pair({"deep": (torch.ones(2),)}, "name"), lambda batch: batch.x["deep"][0]),
        (collections.defaultdict(list, x=torch.ones(2)), lambda batch: batch["x"]),
        (collections.UserDict(x=torch.ones(2)), lambda batch: batch["x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_keeps_its_type_and_is_not_changed_itself(batch: Any, inner: Any) -> None:
    moved = doubled(batch)
    assert type(moved) is type(batch)
    assert inner(moved).dtype == torch.float64 and inner(batch).dtype == torch.float32


def test_batches_and_outputs_of_hugging_face_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"x": torch.ones(2)})
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.ones(2))
    test_a_batch_keeps_its_type_and_is_not_changed_itself(encoding, lambda batch: batch.x)
    test_a_batch_keeps_its_type_and_is_not_changed_itself(output, lambda batch: batch.logits)


def test_other_fields_stay() -> None:
    moved = doubled(Pair(torch.ones(1, dtype=torch.int64), "name"))
    assert moved.name == "name" and moved.length == 3 and moved.x.dtype == torch.int64


def test_a_mapping_that_cannot_be_built_becomes_a_dict() -> None:
    moved = doubled(View())
    assert type(moved) is dict and moved["x"].dtype == torch.float64


def test_what_moves_itself_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PackedSequence keeps its batch sizes on the CPU, which a field by field move would not."""
    asked: list[Any] = []
    monkeypatch.setattr(PackedSequence, "to", lambda self, device: asked.append(device) or "moved")
    assert move([pack_sequence([torch.ones(2)])], torch.device("meta"), None) == ["moved"]
    assert asked == [torch.device("meta")]


def test_what_holds_no_tensors_is_left_alone() -> None:
    anything = object()
    assert doubled(anything) is anything and doubled("text") == "text" and doubled(None) is None
