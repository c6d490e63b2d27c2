"""What ranks send to each other comes back as it was, and reading it runs no code."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from distributed.backends import wire
from distributed.errors import ConfigError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = None


class Named(collections.UserDict[str, Any]):
    """A mapping of its own class."""


def back(value: Any) -> Any:
    return wire.from_bytes(wire.to_bytes(value))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**70), 0.1, math.inf, -0.0, "Ünïcode \ud83d", b"\x00\xff", [], (), {}, [1, (2, [3.5])],
        {"a": (1, None), 2: {"b": b"x"}, (1, 2): "key"}, Pair(1, [2]), Point([1], {"z": 2}), Named(a=[1]),
        [{"__tuple__": 1}, ["tensor", "float32"]], collections.OrderedDict(b=1, a=2), numpy.float32(1.5),
    ],
)  # fmt: skip
def test_plain_values_and_data_containers_come_back_with_their_types(value: Any) -> None:
    found = back(value)
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value)  # also the types of what it holds, and the sign of a zero


def test_nan_comes_back() -> None:
    assert math.isnan(back([math.nan])[0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 4).to(dtype)
    found = back({"t": value.mT if len(shape) == 2 else value})["t"]
    expected = value.mT if len(shape) == 2 else value
    assert found.dtype == dtype and found.shape == expected.shape and torch.equal(found, expected)
    if found.dim() == 0:
        found.fill_(1)  # its memory is its own


@pytest.mark.parametrize(
    "value",
    [
        numpy.arange(6).reshape(2, 3).T, numpy.array(2.5), numpy.array([], "f2"), numpy.array(["a", "bcd"]),
        numpy.array([[1, "a"], [None, (2, 3)]], object), numpy.array(["2026-01-01"], "M8[D]"),
    ],
)  # fmt: skip
def test_arrays_come_back_with_their_element_types(value: Any) -> None:
    found = back(value)
    assert found.dtype == value.dtype and found.shape == value.shape and (found == value).all()


def test_element_types_of_other_libraries_come_back() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    found = back(numpy.array([[1.5, -2.0]], bfloat16))
    assert found.dtype == bfloat16 and found.tolist() == [[1.5, -2.0]]


def test_outputs_of_hugging_face_keep_their_attributes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = back(outputs.SequenceClassifierOutput(logits=torch.ones(2, 3)))
    assert isinstance(found, outputs.SequenceClassifierOutput)
    assert torch.equal(found.logits, torch.ones(2, 3)) and found.loss is None and list(found) == ["logits"]


def test_other_objects_are_refused_by_their_type() -> None:
    @dataclasses.dataclass
    class Local:
        x: int = 1

    for value, name in ((object(), "builtins.object"), (Local(), "Local"), ([Path("x")], "PosixPath")):
        with pytest.raises(ConfigError, match=name):
            wire.to_bytes(value)
    with pytest.raises(ConfigError, match="Tensor"):
        wire.to_bytes(torch.ones(2).to_sparse())


def message(structure: Any) -> bytes:
    text = json.dumps(structure).encode()
    header = json.dumps([len(text)]).encode()
    return struct.pack("<Q", len(header)) + header + text


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return self.path.touch, ()


def test_nothing_that_comes_from_elsewhere_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hostile = [
        pickle.dumps(Evil(marker)), b"", b"\x00" * 8, struct.pack("<Q", 1 << 62), b"[" * 100_000,
        message(["fields", "os", "system", [["command", f"touch {marker}"]]]),
        message(["items", "subprocess", "Popen", [["list", ["touch", str(marker)]]]]),
        message(["mapping", "posixpath", "join", []]), message(["fields", "this", "x", []]),
        message(["tensor", "load", [1], 0]), message(["array", "O", [1], 0]), message(["unknown"]), message([]),
        message(["list"]), struct.pack("<Q", 7) + b"[99999]" + b"[" * 99_999,
    ]  # fmt: skip
    for data in hostile:
        with pytest.raises(ConfigError, match="from another rank cannot be read"):
            wire.from_bytes(data)
    assert not marker.exists()


def written(structure: Any, *buffers: bytes) -> bytes:
    """A message as `to_bytes` frames it."""
    text = json.dumps(structure).encode()
    header = json.dumps([len(text), *map(len, buffers)]).encode()
    return b"".join([struct.pack("<Q", len(header)), header, text, *buffers])


DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


@pytest.mark.filterwarnings("ignore")  # torch's, of types that are experimental or deprecated
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_those_types_are_read_that_are_written(name: str) -> None:
    """A tensor of a quantized type without its quantizer ends the process when it is used."""
    try:
        is_written = json.dumps(f"{name}").encode() in wire.to_bytes(torch.empty(0, dtype=DTYPES[name]))
    except ConfigError:
        is_written = False
    if is_written:
        assert wire.from_bytes(written(["tensor", name, [0], 0], b"")).dtype is DTYPES[name]
        return
    with pytest.raises(ConfigError, match=f"{name} is not an element type"):
        wire.from_bytes(written(["tensor", name, [2], 0], bytes(32)))


def test_a_tensor_without_bytes_has_no_elements() -> None:
    with pytest.raises(ConfigError, match="another program may have connected"):
        wire.from_bytes(written(["tensor", "float32", [8], 0], b""))
    assert wire.from_bytes(written(["tensor", "float32", [0, 3], 0], b"")).shape == (0, 3)
