"""Large parts of files that are verified while a load reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoints import digests, durable
from distributed.checkpoints.digests import FileDigests, FileRecord, file_digest
from distributed.checkpoints.manifest import read_manifest
from distributed.checkpoints.staging import Staging
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.checkpoints.verifying import verify
from distributed.errors import CheckpointError, DamagedError
from distributed.state import TrainState
from tests.conftest import Finished
from tests.unit.test_checkpoint import BytesBackend, Rig, _on_ranks, _reseal, rig

LARGE = 3 << 20  # bytes of each of the two large tensors


class Tensors(BytesBackend):
    """A backend with two large tensors and some small ones, which a load fills from the file. `reads` says which of the large ones."""

    reads: tuple[str, ...] = ("first", "second")
    begun: list[str]  # names of the checkpoints of which a load began
    finished: list[str]  # and of those that were loaded
    after: Callable[[Mapping[str, bytes]], None] = staticmethod(lambda loaded: None)

    def save(self, directory: Path) -> dict[str, Any]:
        if self.rank == 0:
            value = self.weights[:1]
            content = {"first": value * LARGE, "small": value * 100, "second": value * LARGE, "tiny": value * 7}
            write_tensors(
                directory / "model" / "model.safetensors",
                [RawTensor(name, "U8", (len(raw),), lambda raw=raw: raw) for name, raw in content.items()], {},
            )  # fmt: skip
        return {}

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        read: dict[str, bytes] = {}
        tensors, _ = read_raw(directory / "model" / "model.safetensors")
        for tensor in tensors:
            if tensor.copy_to is not None and tensor.name in self.reads:
                memory = bytearray(tensor.num_bytes)
                tensor.copy_to(memoryview(memory))
                read[tensor.name] = bytes(memory)
        self.begun.append(directory.name)
        self.after(read)

        def finish() -> None:
            self.loaded = read | {tensor.name: bytes(tensor.read()) for tensor in tensors if tensor.name not in read}
            self.finished.append(directory.name)

        return finish


def with_tensors(one: Rig, **attributes: Any) -> Rig:
    """Let a store use the backend above."""
    one.backend.__class__ = type("OfThisTest", (Tensors,), {"begun": [], "finished": []} | attributes)
    return one


def save_twice(one: Rig) -> None:
    for value in (1, 2):
        with_tensors(one).backend.weights = bytes([value])
        one.save(value)


def flipped(file: Path, at: int, bit: int = 4) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reads", [("first", "second"), ("second",), ()], ids=str)
def test_a_flipped_bit_anywhere_is_noticed_whatever_the_load_reads_and_the_one_before_is_loaded(
    tmp_path: Path, size: int, reads: tuple[str, ...]
) -> None:
    _on_ranks(tmp_path, size, None, lambda: None, save_twice)
    file, generator = tmp_path / "step-00000002" / "model" / "model.safetensors", random.Random(size + len(reads))
    length = file.stat().st_size
    for at in (0, 9, length - 1, *(generator.randrange(length) for _ in range(12))):
        flipped(file, at)
        rigs, results = _on_ranks(
            tmp_path, size, None, lambda: None,
            lambda one: with_tensors(one, reads=reads).store.resume(one.store.find()),
        )  # fmt: skip
        assert [(path.name, state.step) for path, state in results] == [("step-00000001", 1)] * size, at
        assert all(set(raw) == {1} for one in rigs for raw in one.backend.loaded.values())
        assert [one.backend.finished for one in rigs] == [["step-00000001"]] * size, "damaged values were used"
        assert len(rigs[0].messages) == 1 and "model/model.safetensors" in rigs[0].messages[0]
        (tmp_path / "damaged-step-00000002").rename(tmp_path / "step-00000002")
        flipped(file, at)
    results = _on_ranks(
        tmp_path, size, None, lambda: None, lambda one: with_tensors(one).store.resume(one.store.find())
    )[1]
    assert [state.step for _, state in results] == [2] * size


def test_large_tensors_are_verified_by_the_load_that_reads_them(tmp_path: Path) -> None:
    save_twice(rig(tmp_path))
    flipped(tmp_path / "step-00000002" / "model" / "model.safetensors", LARGE)
    one = with_tensors(rig(tmp_path))
    path = one.store.find()
    assert path == tmp_path / "step-00000002" and one.messages == []
    assert one.store.resume(path)[0] == tmp_path / "step-00000001"
    assert (one.backend.begun, one.backend.finished) == (["step-00000002", "step-00000001"], ["step-00000001"])


def bytes_read() -> int:
    """Return the number of bytes that this process has asked the system to read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resume_reads_each_byte_once(tmp_path: Path) -> None:
    save_twice(rig(tmp_path))
    one, before = with_tensors(rig(tmp_path)), bytes_read()
    one.store.resume(one.store.find())
    assert 1.0 <= (bytes_read() - before) / (2 * LARGE) < 1.05
    one, before = with_tensors(rig(tmp_path / "another run")), bytes_read()
    one.store.resume(one.store.open(tmp_path / "step-00000002"))
    assert 1.0 <= (bytes_read() - before) / (2 * LARGE) < 1.05
    one, before = with_tensors(rig(tmp_path)), bytes_read()
    one.store.resume(one.store.find(in_full=True))
    assert 2.0 <= (bytes_read() - before) / (2 * LARGE) < 2.1, "this test notices two reads"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reads", [("first", "second"), ("second",), ()], ids=str)
def test_a_checkpoint_that_was_asked_for_is_not_replaced_by_another(
    tmp_path: Path, size: int, reads: tuple[str, ...]
) -> None:
    save_twice(rig(tmp_path / "source"))
    path = tmp_path / "source" / "step-00000002"
    flipped(path / "model" / "model.safetensors", LARGE)

    def resume(one: Rig) -> list[str]:
        with_tensors(one, reads=reads)
        with pytest.raises(CheckpointError, match=r"digest differs\); another checkpoint, .*step-00000001"):
            one.store.resume(one.store.open(path))
        return one.backend.finished

    _, results = _on_ranks(tmp_path / "run", size, None, lambda: None, resume)
    assert results == [[]] * size, "damaged values were used"
    assert path.is_dir(), "the checkpoint of another run was set aside"


@pytest.mark.parametrize("failing", [0, 1])
def test_damage_is_the_cause_if_what_was_read_fails_on_one_rank_alone(tmp_path: Path, failing: int) -> None:
    def fail(loaded: Mapping[str, bytes]) -> None:
        if len(set(loaded["first"])) > 1:
            raise ValueError("this is no model")

    _on_ranks(tmp_path, 2, None, lambda: None, save_twice)
    flipped(tmp_path / "step-00000002" / "model" / "model.safetensors", 4096)  # in the first large tensor

    def resume(one: Rig) -> tuple[Path, TrainState]:
        with_tensors(one, after=staticmethod(fail if one.backend.rank == failing else lambda loaded: None))
        return one.store.resume(one.store.find())

    rigs, results = _on_ranks(tmp_path, 2, None, lambda: None, resume)
    assert [path.name for path, _ in results] == ["step-00000001"] * 2
    assert "digest differs" in rigs[0].messages[0]


def test_an_error_of_a_sound_checkpoint_stays_what_it_is(tmp_path: Path) -> None:
    def fail(loaded: Mapping[str, bytes]) -> None:
        raise ValueError("another model")

    save_twice(rig(tmp_path))
    one = with_tensors(rig(tmp_path), after=staticmethod(fail))
    with pytest.raises(CheckpointError, match="its state does not fit this run") as error:
        one.store.resume(one.store.find())
    assert not isinstance(error.value, DamagedError) and one.messages == []


def test_parts_cover_the_file_and_are_the_same_however_it_is_written(tmp_path: Path) -> None:
    one = with_tensors(rig(tmp_path / "now"))
    one.save(1)
    later = with_tensors(rig(tmp_path / "later"))
    assert later.store.save_in_background(TrainState(step=1, samples_seen=10), {"epochs": 1}, None, lambda: None)
    found = [
        read_manifest(path).files["model/model.safetensors"]
        for path in (tmp_path / "now" / "step-00000001", later.store.finish())
    ]
    assert found[0] == found[1]
    sizes = [size for size, _ in found[0].parts]
    assert sum(sizes) == found[0].bytes and sizes.count(LARGE) == 2
    assert all(size == LARGE or size < digests.LARGE_BYTES for size in sizes)


@pytest.mark.parametrize("name", ["model/model.safetensors", "other.txt"])
def test_a_file_that_is_lost_between_the_search_and_the_load_is_noticed_and_the_one_before_is_loaded(
    tmp_path: Path, name: str
) -> None:
    def save(backend: Tensors, directory: Path) -> dict[str, Any]:
        (directory / "other.txt").write_text("nothing reads it")
        return Tensors.save(backend, directory)

    one = with_tensors(rig(tmp_path), save=save)
    for step in (1, 2):
        one.save(step)
    path = one.store.find()
    assert path is not None and path.name == "step-00000002"
    (path / name).unlink()
    assert one.store.resume(path)[0].name == "step-00000001"
    assert any("damaged" in message and name in message for message in one.messages), one.messages


def test_small_files_have_no_parts(tmp_path: Path) -> None:
    path = rig(tmp_path).save(1)
    assert [record.parts for record in read_manifest(path).files.values()] == [()] * 3
    assert '"parts"' not in (path / "manifest.json").read_text()


def test_chunks_are_gathered_into_parts_and_every_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    generator = random.Random(1)
    for number in range(20):
        sizes = [generator.choice([0, 1, 700, 600_000, 1 << 20, 3_000_000]) for _ in range(generator.randrange(1, 9))]
        content = generator.randbytes(sum(sizes))
        staging, path, view = Staging(), tmp_path / str(number), memoryview(content)
        chunks = [view[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        with durable.records_of_written() as written:
            durable.write_file(path, chunks, len(content))
        record = written[path]
        assert (record.bytes, record.xxh3_128) == (len(content), file_digest(path)), sizes
        position = 0
        for size, digest in record.parts:
            again = FileDigests()
            again.update(view[position : position + size])
            again.end_part()
            assert digest == again.record().xxh3_128
            position += size
        assert position == (len(content) if record.parts else 0)
        assert bool(record.parts) == (max(sizes) >= digests.LARGE_BYTES and len([size for size in sizes if size]) > 1)
        with staging.copying(tmp_path):
            memory = durable.memory_for(tmp_path / "copy", sizes)
            assert memory is not None
            memory[:] = content
        assert staging.write() == {tmp_path / "copy": record}
        (tmp_path / "copy").unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts["bytes"].pop(), lambda parts: parts["bytes"].__setitem__(0, 5),
        lambda parts: parts["bytes"].__setitem__(0, -1), lambda parts: parts["xxh3_128"].__setitem__(0, 7),
        lambda parts: (parts["bytes"].append(0), parts["xxh3_128"].append("")), lambda parts: parts.pop("bytes"),
        lambda parts: parts.update(bytes="all"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_are_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    path = with_tensors(rig(tmp_path)).save(1)
    _reseal(path, lambda content: change(content["files"]["model/model.safetensors"]["parts"]))
    with pytest.raises(CheckpointError, match=r"manifest\.json (has|lacks)"):
        read_manifest(path)


def test_too_many_parts_are_left_out_and_the_whole_file_is_verified_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MAX_PARTS", 2)
    path = with_tensors(rig(tmp_path)).save(1)
    assert json.loads((path / "manifest.json").read_text())["files"]["model/model.safetensors"].keys() == {
        "bytes",
        "xxh3_128",
    }
    flipped(path / "model" / "model.safetensors", LARGE)
    with pytest.raises(CheckpointError, match="digest differs"):
        with_tensors(rig(tmp_path)).store.open(path)


def test_a_record_is_the_same_after_json() -> None:
    for record in (FileRecord(3, "ab"), FileRecord(9, "cd", ((4, "x"), (5, "y")))):
        assert FileRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_verify_reads_large_parts_too(tmp_path: Path) -> None:
    path = with_tensors(rig(tmp_path)).save(1)
    verify(path)
    flipped(path / "model" / "model.safetensors", LARGE)
    with pytest.raises(DamagedError, match=r"model\.safetensors does not have the content that was saved"):
        verify(path)


def test_a_damaged_checkpoint_that_cannot_be_renamed_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_twice(rig(tmp_path))
    flipped(tmp_path / "step-00000002" / "model" / "model.safetensors", LARGE)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    for in_full in (False, True):
        one = with_tensors(rig(tmp_path))
        with pytest.raises(
            CheckpointError, match=r"digest differs\); it cannot be renamed \(Permission denied\): remove it"
        ):
            one.store.resume(one.store.find(in_full=in_full))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_file_that_one_rank_could_not_read_once_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """All ranks raise the same kind of error, and nothing is set aside."""
    _on_ranks(tmp_path, 2, None, lambda: None, save_twice)

    def resume(one: Rig) -> str:
        def stale(read: Mapping[str, bytes]) -> None:
            raise DamagedError("state.json cannot be read: Stale file handle")

        with_tensors(one, after=staticmethod(stale if one.backend.rank == failing else lambda read: None))
        path = one.store.find()
        with pytest.raises(CheckpointError) as error:
            one.store.resume(path)
        assert not isinstance(error.value, DamagedError)
        return str(error.value)

    _, results = _on_ranks(tmp_path, 2, None, lambda: None, resume)
    assert all("Stale file handle" in each for each in results)
    assert (tmp_path / "step-00000002").is_dir()


# Trains to step STEPS. The module has a large extra state and fails with an error of its own if that is damaged.
PACKED = """
import sys
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Show(Callback):
    def on_train_end(self, state):
        print("decays", sorted({group["weight_decay"] for group in self.context.optimizer.param_groups}))

class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.extra = torch.nn.Linear(4, 1), torch.full((2 << 20,), 7, dtype=torch.uint8)
    def forward(self, inputs):
        return self.layer(inputs).squeeze(1)
    def get_extra_state(self):
        return self.extra
    def set_extra_state(self, state):
        if not bool((state == 7).all()):
            raise RuntimeError("damaged values were given to the module")

trainer = Trainer(
    Packed(), loss_fn=torch.nn.functional.mse_loss, optimizer="adamw", batch_size=8, epochs=10, checkpoint_every_n_steps=2,
    max_steps=int(sys.argv[1]), weight_decay=float(sys.argv[2]), backend="single", callbacks=[Show()],
)
assert trainer.fit(TensorDataset(torch.ones(32, 4), torch.ones(32))).steps == int(sys.argv[1])
"""


def test_a_module_gets_verified_values_alone_and_the_settings_of_the_resume_hold(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "packed.py").write_text(PACKED)

    def train(steps: str, decay: str, *flags: str) -> Finished:
        script, run = str(tmp_path / "packed.py"), str(tmp_path / "run")
        done = run_cli(["train", "--script", script, "--run-dir", run, *flags, "--", steps, decay])
        assert done.returncode == 0, done.output
        return done

    train("4", "0.1")
    checkpoints = tmp_path / "run" / "checkpoints"
    flipped(checkpoints / "step-00000004" / "model" / "model.safetensors", 1 << 20)
    done = train("6", "0.5", "--resume")
    assert "decays [0.0, 0.5]" in done.stdout and "resumed from step-00000002" in done.stdout, done.output
    assert done.stdout.count("weight_decay=0.5 replaces the checkpoint's 0.1") == 1
    assert (checkpoints / "damaged-step-00000004").is_dir()
