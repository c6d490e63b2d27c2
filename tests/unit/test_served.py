"""Programs of torch.export that MLflow loads: they compute what the model computes, and load without running code."""

from __future__ import annotations

import collections
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from distributed.backends._torch import programs
from distributed.backends._torch.served import TorchProgram, check_program, checked
from distributed.errors import CheckpointError


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.body(x) * scale, "half": x[: x.shape[0] // 2]}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "named.pt2"
    programs.write(Named(), path, "torch-export", {"x": torch.randn(6, 4), "scale": torch.ones(6, 1)})
    return path


def test_named_inputs_give_named_arrays(program):
    found = TorchProgram(program).predict({"x": numpy.ones((3, 4)), "scale": numpy.full((3, 1), 2.0)})
    assert set(found) == {"scores", "half"} and found["scores"].shape == (3, 6) and found["half"].shape == (1, 4)
    assert isinstance(found["scores"], numpy.ndarray)


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Sequential(
            torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.MaxPool1d(2), torch.nn.Flatten()
        ),
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)),
    ],
    ids=["conv", "attention", "norm"],
)
def test_ordinary_models_are_not_refused(tmp_path, model):
    inputs = torch.randn(5, 3, 8)
    programs.write(model, tmp_path / "a.pt2", "torch-export", inputs)
    found = TorchProgram(tmp_path / "a.pt2").predict(inputs.numpy())
    numpy.testing.assert_allclose(found, model.eval()(inputs).detach(), rtol=1e-4, atol=1e-5)


class Nested(torch.nn.Module):
    def forward(self, x: dict[str, torch.Tensor], y: tuple[torch.Tensor, list[torch.Tensor]]) -> Any:
        scores = torch.einsum("ij,kj->ik", torch.nn.functional.gelu(x["a"], approximate="tanh"), y[0])
        rounded = torch.div(y[1][0], 2.0, rounding_mode="floor")
        padded = torch.nn.functional.pad(x["a"], (1, 1), mode="reflect")
        return collections.OrderedDict(scores=scores, more=[padded, (rounded,)])


def test_containers_and_words_of_operators_are_not_refused(tmp_path):
    inputs = ({"a": torch.randn(3, 4)}, (torch.randn(2, 4), [torch.randn(3)]))
    programs.write(Nested(), tmp_path / "a.pt2", "torch-export", inputs)
    found = torch.export.load(checked(tmp_path / "a.pt2")).module()(*inputs)
    assert torch.equal(found["more"][0], Nested()(*inputs)["more"][0])


def test_inputs_get_the_element_type_of_the_program(tmp_path):
    for dtype in (torch.float64, torch.bfloat16):
        model = torch.nn.Linear(4, 2, dtype=dtype)
        programs.write(model, tmp_path / "a.pt2", "torch-export", torch.randn(3, 4, dtype=dtype))
        found = TorchProgram(tmp_path / "a.pt2").predict(numpy.ones((2, 4), "float32"))
        expected = model(torch.ones(2, 4, dtype=dtype)).detach().double()
        numpy.testing.assert_allclose(found.astype("float64"), expected, rtol=1e-6)


def test_torch_reads_what_was_checked_and_not_the_file(program, tmp_path):
    # Python's zipfile finds the archive behind other bytes. Torch's reader does not, or finds another one in them.
    (tmp_path / "two.pt2").write_bytes(b"x" * 100 + program.read_bytes())
    found = TorchProgram(tmp_path / "two.pt2").predict({"x": numpy.ones((3, 4)), "scale": numpy.ones((3, 1))})
    assert found["scores"].shape == (3, 6)


def changed(program: Path, to: Path, change: Callable[[str, bytes], bytes | None], more: dict[str, bytes]) -> Path:
    """Copy the archive with the content of each file as `change` returns it, and with more files."""
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(to, "w") as out:
        root = source.namelist()[0].partition("/")[0]
        for name in source.namelist():
            if (content := change(name, source.read(name))) is not None:
                out.writestr(name, content)
        for name, content in more.items():
            out.writestr(f"{root}/{name}", content)
    return to


def keep(name: str, content: bytes) -> bytes:
    return content


def replaced(end: str, old: str, new: str) -> Callable[[str, bytes], bytes]:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith(end):
            return content
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return change


def edited(edit: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        model = json.loads(content)
        edit(model["graph_module"])
        return json.dumps(model).encode()

    return change


def text_given(graph_module: Any) -> None:
    graph_module["graph"]["nodes"][-1]["inputs"][0]["arg"] = {"as_string": "/tmp/a-file"}


def enum_as_key(graph_module: Any) -> None:
    context = json.dumps([{"__enum__": True, "fqn": "antigravity:A", "name": "b"}])
    spec = [1, {"type": "builtins.dict", "context": context, "children_spec": []}]
    graph_module["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)


def emptied(name: str, content: bytes) -> bytes | None:
    return None if name.endswith("sample_inputs/model.pt") else content


def test_an_archive_that_could_run_code_is_refused(program, tmp_path):
    with zipfile.ZipFile(program) as archive:
        model = next(name for name in archive.namelist() if name.endswith("models/model.json"))
        symbol = next(value for value in words(json.loads(archive.read(model))) if "Symbol" in value)
    bomb = pickle.dumps(print)
    cases: dict[str, tuple[Any, dict[str, bytes]]] = {
        "a pickle in": (replaced("weights_config.json", '"use_pickle": false', '"use_pickle": true'), {}),
        "the function torch.os.system": (replaced("models/model.json", "torch.ops.aten.linear.default", "torch.os.system"), {}),
        "the function _operator.call": (replaced("models/model.json", "torch.ops.aten.linear.default", "_operator.call"), {}),
        "the expression": (replaced("models/model.json", f'"expr_str": "{symbol}"', '"expr_str": "eval(chr(49))"'), {}),
        "the file": (keep, {"data/aotinductor/model/model.so": b"x"}),
        "the file data/sample_inputs/model.pt": (emptied, {"data/sample_inputs/model.pt": bomb}),
        "the function torch.ops.aten.from_file.default": (
            replaced("models/model.json", "torch.ops.aten.linear.default", "torch.ops.aten.from_file.default"), {},
        ),
        "the function torch.ops.aten.linear.__call__": (
            replaced("models/model.json", "torch.ops.aten.linear.default", "torch.ops.aten.linear.__call__"), {},
        ),
        "text for the argument": (edited(text_given), {}),
        "containers in": (replaced("models/model.json", "builtins.dict", "collections.defaultdict"), {}),
        "containers in in_spec": (edited(enum_as_key), {}),
        "two files of the same name": (keep, {"models/MODEL.json": b"{}"}),
        "the object": (replaced("weights_config.json", '"weight_0"', '"opaque_obj_0"'), {}),
    }  # fmt: skip
    check_program(Path(shutil.copy(program, tmp_path / "same.pt2")))
    for words_, (change, more) in cases.items():
        with pytest.raises(CheckpointError, match=f"is not loaded: it holds {words_}"):
            TorchProgram(changed(program, tmp_path / "changed.pt2", change, more))
    (tmp_path / "no.pt2").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"is not a program of torch\.export"):
        check_program(tmp_path / "no.pt2")


def words(content: Any) -> list[str]:
    """Return every `expr_str` of a program."""
    if isinstance(content, dict):
        own = [str(value) for key, value in content.items() if key == "expr_str"]
        return own + [word for value in content.values() for word in words(value)]
    return [word for value in content for word in words(value)] if isinstance(content, list) else []
