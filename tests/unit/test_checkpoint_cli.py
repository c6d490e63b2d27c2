"""`distributed checkpoint list | verify | export`, over checkpoints that need no framework to be made."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

from distributed.backends.world import OneProcess
from distributed.checkpoints import tensor_file
from distributed.checkpoints.store import CheckpointStore
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.cli.__main__ import main
from distributed.cli.checkpoint import app
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import CheckpointError, ConfigError
from distributed.state import TrainState, WorkerContext

HALF = b"\x80\x3f\x00\xc0"  # 1.0 and -2.0 as bfloat16
DOUBLE = struct.pack("<d", 0.1)


class OneFile:
    """The parts of a backend that a save needs."""

    plan = ProcessPlan(1, 2, "cpu", "pytorch-ddp")
    config = DistributedConfig()
    world = OneProcess(WorkerContext(0, 2, 0, 2, 0, "cpu"))

    def save(self, directory: Path) -> dict[str, Any]:
        (directory / "model").mkdir()
        tensors = [RawTensor("embed.weight", "BF16", (2,), lambda: HALF), RawTensor("scale", "F64", (), lambda: DOUBLE)]
        write_tensors(
            directory / "model" / "model.safetensors", tensors, {"aliases": '{"head.weight": "embed.weight"}'}
        )
        return {}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 (best) and 20."""
    store = CheckpointStore(
        tmp_path / "run" / "checkpoints", OneFile(), keep_latest_k=3, keep_best=True, monitor="val_loss",
        monitor_mode="min", context=WorkerContext(0, 2, 0, 2, 0, "cpu"), on_event=lambda event: None,
    )  # fmt: skip
    for step, value in ((10, 0.25), (20, 0.5)):
        store.save(TrainState(step=step, epoch=step // 10), {}, value)
    return tmp_path / "run"


def command(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def damage(run: Path) -> Path:
    path = run / "checkpoints" / "step-00000020"
    os.truncate(path / "model" / "model.safetensors", 30)
    return path


def test_list_shows_each_checkpoint_with_its_best_and_whether_it_verifies(run: Path) -> None:
    result = command("list", run)
    rows = [line.split() for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert [row[:2] for row in rows[1:]] == [["10", "1"], ["20", "2"]]
    assert rows[1][-2:] == ["best", "yes"]
    assert "pytorch-ddp x 2" in result.output
    assert rows[0][-2:] == ["val_loss", "verified"] and rows[1][-3] == "0.25"
    assert max(map(len, result.output.splitlines())) <= 80
    damage(run)
    result = command("list", run / "checkpoints")
    assert result.output.splitlines()[2].split()[-1] == "no"
    assert "model.safetensors has 30 bytes" in result.output


@pytest.mark.parametrize("verb", ["list", "verify", "export"])
def test_a_wrong_path_is_one_line_and_a_usage_error(
    verb: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    wrong = [tmp_path / "nowhere", tmp_path / "file", tmp_path / "empty", run / "checkpoints" / "step-00000030"]
    for path in wrong:
        with pytest.raises(SystemExit) as end:
            main(["checkpoint", verb, str(path), *([str(tmp_path / "out.safetensors")] if verb == "export" else [])])
        shown = capsys.readouterr()
        assert (end.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
        assert shown.err.startswith("error: ") and str(path) in shown.err


def test_without_a_verb_the_verbs_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["checkpoint"])
    shown = capsys.readouterr()
    assert (end.value.code, shown.err) == (2, "")
    assert all(verb in shown.out for verb in ("list", "verify", "export"))


def test_verify_says_yes_or_names_the_damaged_file_and_exits_1(run: Path) -> None:
    result = command("verify", run)
    assert result.exit_code == 0
    assert "step 20, 2 files" in result.output
    result = command("verify", damage(run))
    assert result.exit_code == 1
    assert "model/model.safetensors has 30 bytes" in result.output
    error = command("verify", run / "nowhere").exception
    assert isinstance(error, CheckpointError)
    assert error.exit_code == 2


def test_export_writes_every_weight_by_name_and_bit_for_bit(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert command("export", run / "checkpoints" / "step-00000010", out).exit_code == 0
    tensors = {tensor.name: tensor for tensor in read_raw(out)[0]}
    assert {name: (t.dtype, t.shape, bytes(t.read())) for name, t in tensors.items()} == {
        "embed.weight": ("BF16", (2,), HALF), "head.weight": ("BF16", (2,), HALF), "scale": ("F64", (), DOUBLE),
    }  # fmt: skip
    with safe_open(out, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("scale").item() == 0.1


def test_export_spares_an_existing_file_unless_forced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    error = command("export", run, out).exception
    assert isinstance(error, ConfigError)
    assert "--force" in str(error)
    assert out.read_text() == "mine"
    assert command("export", run, out, "--force").exit_code == 0
    assert len(read_raw(out)[0]) == 3
    for wrong in (tmp_path, tmp_path / "none" / "out.safetensors"):
        assert isinstance(command("export", run, wrong).exception, ConfigError)


def test_a_failed_or_damaged_export_leaves_the_old_file_and_nothing_else(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("mine")

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert "No space left" in str(command("export", run, out, "--force").exception)
    assert isinstance(command("export", damage(run), out, "--force").exception, CheckpointError)
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "run"]


def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    for header in (
        b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":1}',
        b"[" * 100_000,
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_raw(path)
    monkeypatch.setattr(tensor_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="more than one file can"):
        write_tensors(path, [RawTensor("a" * 200, "U8", (1,), lambda: b"1")], {})
