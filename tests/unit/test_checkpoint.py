"""CheckpointStore: what is committed survives, what is damaged is noticed. A backend of plain bytes, no framework."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import safe_open

from distributed.backends import wire
from distributed.backends.world import OneProcess
from distributed.checkpoints import directory, durable, manifest
from distributed.checkpoints import store as checkpoint
from distributed.checkpoints.digests import FileRecord, file_digest
from distributed.checkpoints.manifest import NewerFormatError, list_checkpoints, resolve
from distributed.checkpoints.staging import Copying
from distributed.checkpoints.store import CheckpointStore, read_state
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.checkpoints.verifying import part_to_verify, verify
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import CheckpointError, TrainingError
from distributed.state import DATA_VERSION, TrainState, WorkerContext


class BytesBackend:
    """One rank of a backend whose model is a few bytes. `threads` lets several agree."""

    def __init__(self, rank: int = 0, threads: Threads | None = None) -> None:
        self.rank, self.plan = rank, ProcessPlan(1, threads.size if threads else 1, "cpu", "bytes")
        self.world = OneProcess(WorkerContext(0, 1, 0, 1, 0, "cpu")) if threads is None else OneOf(rank, threads)
        self.weights, self.extra, self.loaded = b"\x01\x02\x03\x04" * 64, {"groups": []}, None
        self.before_save: Callable[[], None] = lambda: None
        self.config, self.copying = DistributedConfig(timeout_s=5), Copying()

    def save(self, directory: Path) -> dict[str, Any]:
        self.before_save()
        self._write(directory / "rng" / f"rank-{self.rank}.safetensors", bytes([self.rank]) * 40)
        if self.rank == 0:
            self._write(directory / "model" / "model.safetensors", self.weights)
        return dict(self.extra)

    def _write(self, path: Path, content: bytes) -> None:
        write_tensors(path, [RawTensor("weight", "U8", (len(content),), lambda: content)], {})

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        tensors, _ = read_raw(directory / "model" / "model.safetensors")

        def finish() -> None:
            self.loaded = (bytes(tensors[0].read()), state)

        return finish


class OneOf:
    """One rank's view of `threads`."""

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank, self.threads = rank, threads
        self.context = WorkerContext(rank, threads.size, rank, threads.size, 0, "cpu")

    def reduce(self, sums: Mapping[str, float]) -> dict[str, float]:
        return self.threads.reduce(self.rank, sums)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.threads.share(self.rank, value)[src]

    def gather(self, value: Any) -> list[Any]:
        return self.threads.share(self.rank, value)

    def key_value_store(self) -> Threads | None:
        return self.threads if self.threads.has_store else None


class Threads:
    """Collectives and a store between threads; a rank that waits for the dead fails after 10 s."""

    def __init__(self, size: int, *, has_store: bool = True) -> None:
        self.size, self.slots, self.barrier = size, [None] * size, threading.Barrier(size, timeout=10)
        self.has_store = has_store
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def share(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = wire.to_bytes(value)
        self.barrier.wait()
        values = [wire.from_bytes(slot) for slot in self.slots]
        self.barrier.wait()
        return values

    def reduce(self, rank: int, sums: Mapping[str, float]) -> dict[str, float]:
        rows = self.share(rank, dict(sums))
        return {name: sum(row[name] for row in rows) for name in sums}


@dataclasses.dataclass
class Rig:
    """A store on one rank, with what it reported."""

    store: CheckpointStore
    backend: BytesBackend
    events: list[dict[str, Any]]

    def save(self, step: int, best_value: float | None = None, **fields: Any) -> Path | None:
        return self.store.save(TrainState(step=step, samples_seen=step * 10, **fields), {"epochs": 1}, best_value)

    @property
    def messages(self) -> list[str]:
        return [event["text"] for event in self.events]


def rig(directory: Path, rank: int = 0, threads: Threads | None = None, **options: Any) -> Rig:
    backend, events = BytesBackend(rank, threads), []
    size = threads.size if threads else 1
    given = {"keep_latest_k": 3, "keep_best": True, "monitor": "val_loss", "monitor_mode": "min"} | options
    context = WorkerContext(rank, size, rank, size, 0, "cpu")
    return Rig(CheckpointStore(directory, backend, context=context, on_event=events.append, **given), backend, events)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_save_is_found_verified_and_loaded_again(tmp_path: Path) -> None:
    first = rig(tmp_path / "checkpoints")
    state = TrainState(
        step=12, epoch=1, samples_seen=120, samples_in_epoch=20, metrics={"loss": math.nan, "best": math.inf},
        callbacks={"mine": {"pair": (1, 2.5), 7: [None, True]}},
    )  # fmt: skip
    path = first.store.save(state, {"epochs": 3}, 0.5)
    second = rig(tmp_path / "checkpoints")
    assert path == second.store.find() == tmp_path / "checkpoints" / "step-00000012"
    loaded = second.store.resume(path)[1]
    assert math.isnan(loaded.metrics.pop("loss"))
    assert state.metrics.pop("loss")
    assert loaded == state
    assert second.backend.loaded == (first.backend.weights, {"groups": []})
    found = verify(path)
    assert (found.step, found.epoch, found.samples_seen, found.samples_in_epoch) == (12, 1, 120, 20)
    assert (found.backend, found.world_size, found.config, found.monitor_value) == ("bytes", 1, {"epochs": 3}, 0.5)
    assert set(found.files) == {"state.json", "model/model.safetensors", "rng/rank-0.safetensors"}
    assert first.events == second.events == []


def test_nothing_stored_holds_a_path_of_this_machine(tmp_path: Path) -> None:
    path = rig(tmp_path / "a").save(1)
    assert not [f for f in path.rglob("*") if f.is_file() and str(tmp_path).encode() in f.read_bytes()]
    moved = shutil.move(tmp_path / "a", tmp_path / "b")
    assert rig(Path(moved)).store.find() == tmp_path / "b" / "step-00000001"


def test_files_and_directories_are_synced_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(fd: int) -> None:
        calls.append(("fsync", os.path.relpath(Path(f"/proc/self/fd/{fd}").readlink(), tmp_path)))
        fsync(fd)

    def recording_rename(source: Any, target: Any) -> None:
        calls.append(("rename", os.path.relpath(target, tmp_path)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    rig(tmp_path / "c").save(5)
    stage = "c/.tmp-step-00000005"
    at = {call: i for i, call in enumerate(calls)}  # the last of each
    commit = at["rename", "c/step-00000005"]
    files = ["model/model.safetensors", "rng/rank-0.safetensors", "state.json", "manifest.json"]
    directories = [f"{stage}/model", f"{stage}/rng", stage]
    synced = [at["fsync", f"{stage}/{name}"] for name in files] + [at["fsync", name] for name in directories]
    assert max(synced) < commit < at["fsync", "c"]
    assert at["fsync", f"{stage}/manifest.json"] > max(at["fsync", f"{stage}/{name}"] for name in files[:3])
    assert at["fsync", "."] < commit  # the new directory of checkpoints itself


def test_digests_come_from_the_writes_of_each_rank_and_only_other_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(directory, "file_digest", lambda path: read.append(path.name) or file_digest(path))
    threads = Threads(2)
    ranks = [rig(tmp_path, rank, threads) for rank in range(2)]
    ranks[1].backend.before_save = lambda: (tmp_path / ".tmp-step-00000001" / "own.bin").write_bytes(b"of the engine")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda each: each.save(1), ranks))
    assert read == ["own.bin"]
    assert set(verify(paths[0]).files) == {
        "state.json", "model/model.safetensors", "rng/rank-0.safetensors", "rng/rank-1.safetensors", "own.bin"
    }  # fmt: skip


def test_what_changes_between_the_write_and_the_commit_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real = rig(tmp_path), checkpoint.write_state

    def damage(change: Callable[[Path], None]) -> None:
        def write_state(stage: Path, *args: Any) -> None:
            real(stage, *args)
            change(stage)

        monkeypatch.setattr(checkpoint, "write_state", write_state)

    damage(_flip)
    path = one.save(1)
    with pytest.raises(CheckpointError, match="digest differs"):
        verify(path)
    damage(_truncate)
    assert one.save(2) is None
    assert "has 100 bytes" in one.events[-1]["cause"]


@pytest.mark.parametrize("code", [28, 5], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("step", [1, 2], ids=["same-step", "next-step"])
def test_whichever_write_sync_or_rename_fails_the_newest_checkpoint_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: int
) -> None:
    real = {name: getattr(os, name) for name in ("write", "fsync", "rename", "mkdir", "ftruncate", "rmdir", "unlink")}
    real["fsync"] = lambda fd: None  # that it is called is counted; waiting for the disk would prove nothing here
    monkeypatch.setattr(os, "fsync", real["fsync"])
    count, fail_at = 0, 0

    def failing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == fail_at:
                raise OSError(code, os.strerror(code))
            return real[name](*args, **kwargs)

        return call

    failed_saves = 0
    for n in range(1, 200):
        directory = tmp_path / str(n)
        one = rig(directory, keep_latest_k=1)
        one.save(1)
        one.backend.weights = b"new" * 100
        count, fail_at = 0, n
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, failing(name))
            saved = one.save(step, best_value=1.0)
        if count < n:
            break
        failed_saves += saved is None
        kept = list_checkpoints(directory)
        assert kept, f"call {n} of {code} lost everything"
        assert verify(kept[-1].path)
        if saved is None:
            assert one.events[-1]["cause"] == os.strerror(code)
            assert not [name for name in names(directory) if name.startswith(".tmp")]
        after = rig(directory)
        found = after.store.find()
        assert found is not None
        assert verify(found)
        assert after.messages == []
        assert all(name.startswith("step-") for name in names(directory))
        assert one.save(step + 1) is not None, "the next save must work again"
        shutil.rmtree(directory)
    else:
        pytest.fail("the save never passed")
    assert failed_saves >= 15


def _save_for_ever(directory: Path, start: int) -> None:
    one = rig(directory, keep_latest_k=2)
    step = start
    while True:
        step += 1
        one.backend.weights = step.to_bytes(4, "big") * 5000
        one.save(step, best_value=float(step % 7))
        if step % 3 == 0:  # the same step again: a directory is replaced
            one.save(step, best_value=-float(step), epoch=1)


def _save_in_background_for_ever(directory: Path, step: int) -> None:
    one = rig(directory, keep_latest_k=2)
    while True:
        step += 1
        one.backend.weights = step.to_bytes(4, "big") * 5000
        one.store.save_in_background(TrainState(step=step), {"epochs": 1}, None, lambda: None)
        one.backend.weights = b"not saved"
        one.store.finish()


def _kill_saves(directory: Path, kills: int, save_for_ever: Callable[[Path, int], None]) -> None:
    generator, last, interrupted = random.Random(1), 0, 0
    first = rig(directory)
    first.save(0)  # imports what a save needs
    start = time.monotonic()
    first.save(1)
    window_s = 3 * (time.monotonic() - start)
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(directory, last)
            finally:
                os._exit(1)
        time.sleep(0.002 + generator.uniform(0, window_s))  # when the kill falls is what this test varies
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any(name.startswith(".") for name in names(directory))
        before, last = last, _check_after_kill(directory, last)
        window_s *= 1.2 if last == before else 0.9  # about every second child commits a save, on a busy machine too
    assert interrupted >= kills // 4
    assert last > kills // 15


def _check_after_kill(directory: Path, last: int) -> int:
    fresh = rig(directory, keep_latest_k=2)
    found = fresh.store.find()
    assert found is not None
    assert fresh.messages == []
    state = fresh.store.resume(found)[1]
    assert state.step >= last, "an older checkpoint than one that was committed before"
    if state.step > 1:
        assert fresh.backend.loaded[0] == state.step.to_bytes(4, "big") * 5000
    assert all(name.startswith("step-") for name in names(directory)), "leftovers of a dead save"
    return state.step


@pytest.mark.parametrize(
    ("kills", "how"),
    [
        (150, _save_for_ever),
        (30, _save_in_background_for_ever),
        pytest.param(300, _save_in_background_for_ever, marks=pytest.mark.full),
    ],
    ids=["at once", "in the background", "in the background, often"],
)
def test_sigkill_anywhere_in_a_save_leaves_a_newest_checkpoint_that_verifies(
    tmp_path: Path, run_python: Callable[..., Any], kills: int, how: Callable[[Path, int], None]
) -> None:
    done = run_python(
        [__file__, str(tmp_path / "checkpoints"), str(kills), how.__name__], timeout=60
    )  # forks best without pytest's threads
    assert done.returncode == 0, done.output


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = rig(tmp_path).save(3, best_value=0.25)
    generator = random.Random(2)
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for _ in range(100):
            at, bit = generator.randrange(len(content)), 1 << generator.randrange(8)
            file.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            with pytest.raises(CheckpointError, match=file.name):
                verify(path)
        file.write_bytes(content)
    assert verify(path)


def _truncate(path: Path) -> None:
    os.truncate(path / "model" / "model.safetensors", 100)


def _remove_file(path: Path) -> None:
    (path / "rng" / "rank-0.safetensors").unlink()


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _empty_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("")


def _flip(path: Path) -> None:
    file = path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def _remove_all(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


DAMAGES = {
    _truncate: "model.safetensors", _remove_file: "rank-0.safetensors", _remove_manifest: "manifest.json",
    _empty_manifest: "manifest.json", _flip: "model.safetensors", _remove_all: "manifest.json",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_newest_is_set_aside_with_one_warning_and_the_one_before_is_found(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    one = rig(tmp_path)
    good, bad = one.save(10), one.save(20)
    damage(bad)
    fresh = rig(tmp_path)
    assert fresh.store.find() == good
    (message,) = fresh.messages
    assert DAMAGES[damage] in message
    assert "step 20" in message
    assert names(tmp_path) == ["damaged-step-00000020", "step-00000010"]
    again = rig(tmp_path)
    assert (again.store.find(), again.messages) == (good, [])


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_checkpoint_asked_for_by_name_is_an_error_and_stays(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    one = rig(tmp_path)
    good, bad = one.save(10), one.save(20)
    damage(bad)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]) as error:
        rig(tmp_path / "elsewhere").store.open(bad)
    assert str(good) in str(error.value)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_a_directory_of_damaged_ones_alone_is_no_fresh_start(tmp_path: Path) -> None:
    assert rig(tmp_path / "new").store.find() is None
    one = rig(tmp_path)
    for step in (1, 2):
        _truncate(one.save(step))
    fresh = rig(tmp_path)
    for warnings in (2, 2):  # said once each, and still refused the next time
        with pytest.raises(CheckpointError, match=r"only damaged checkpoints \(damaged-step-00000001, damaged-step-0"):
            fresh.store.find()
        assert len(fresh.messages) == warnings


def test_a_checkpoint_of_a_later_format_is_refused_and_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig(tmp_path)
    one.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 2)
        one.save(2)
    with pytest.raises(NewerFormatError, match="upgrade"):
        rig(tmp_path).store.find()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_with_an_order_of_a_later_version_is_refused_and_not_set_aside(tmp_path: Path) -> None:
    one = rig(tmp_path)
    path = one.save(1, data_version=DATA_VERSION + 1)
    with pytest.raises(NewerFormatError, match=f"version {DATA_VERSION + 1} of the order.*: upgrade"):
        rig(tmp_path).store.resume(path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_a_directory_and_a_checkpoint_can_all_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rig(tmp_path / "run" / "checkpoints").save(4)
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints", path):
        assert resolve(given) == path
    monkeypatch.chdir(tmp_path)
    assert rig(tmp_path / "x").store.open("run") == path
    for wrong in (tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json"):
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            resolve(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resolve(tmp_path / "empty")


def test_the_newest_and_the_best_are_kept_also_after_a_restart(tmp_path: Path) -> None:
    values = {1: 0.9, 2: 0.3, 3: 0.5, 4: None, 5: math.nan, 6: 0.4}
    for step, value in values.items():
        rig(tmp_path, keep_latest_k=2).save(step, value)  # a new process each time
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert [info.step for info in list_checkpoints(tmp_path) if info.is_best] == [2]


def test_without_keep_best_only_the_newest_are_kept(tmp_path: Path) -> None:
    one = rig(tmp_path, keep_latest_k=2, keep_best=False)
    for step in range(1, 6):
        one.save(step, float(step))
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_monitor_that_nobody_measures_leaves_the_newest(tmp_path: Path) -> None:
    one = rig(tmp_path, keep_latest_k=2, monitor="val_acuracy", monitor_mode="max")
    for step in range(1, 5):
        one.save(step, None)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_monitor_mode_max_keeps_the_largest(tmp_path: Path) -> None:
    one = rig(tmp_path, keep_latest_k=1, monitor="val_accuracy", monitor_mode="max")
    for step, value in enumerate((0.5, 0.9, 0.7), start=1):
        one.save(step, value)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_after_going_back_to_an_older_step_the_last_save_is_the_newest(tmp_path: Path) -> None:
    one = rig(tmp_path, keep_latest_k=2)
    for step in (10, 20):
        one.save(step)
    back = rig(tmp_path, keep_latest_k=2)
    back.store.resume(back.store.open(tmp_path / "step-00000010"))
    assert back.save(12) == rig(tmp_path).store.find()
    assert names(tmp_path) == ["step-00000012", "step-00000020"]


def test_the_same_state_is_not_written_twice_but_a_changed_one_is(tmp_path: Path) -> None:
    one = rig(tmp_path)
    path = one.save(8, 0.5, train_time_s=1.0)
    before = path.stat().st_ino
    one.save(8, 0.5, train_time_s=2.0, total_time=3.0)
    assert path.stat().st_ino == before
    one.save(8, 0.5, epoch=1)
    assert read_state(path)[0].epoch == 1
    resumed = rig(tmp_path)
    resumed.store.resume(resumed.store.find())
    before = path.stat().st_ino
    resumed.save(8, 0.5, epoch=1)
    assert path.stat().st_ino == before
    _truncate(path)
    resumed.save(8, 0.5, epoch=1)
    assert verify(path)


def test_another_runs_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    rig(tmp_path).save(8)
    one = rig(tmp_path)
    one.backend.weights = b"mine"
    one.store.resume(one.save(8))
    assert one.backend.loaded[0] == b"mine"


def test_leftovers_of_a_dead_process_are_removed_and_a_replaced_checkpoint_comes_back(tmp_path: Path) -> None:
    path = rig(tmp_path).save(8)
    path.rename(tmp_path / ".old-step-00000008")
    for name in (".tmp-step-00000009", ".trash-step-00000001"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    assert rig(tmp_path).store.find() == path
    assert names(tmp_path) == ["notes.txt", "step-00000008"]


def test_a_failed_save_is_reported_with_bytes_and_the_third_in_a_row_ends_training(tmp_path: Path) -> None:
    one = rig(tmp_path / "c")
    one.save(1)

    def full() -> None:
        raise OSError(28, "No space left on device")

    one.backend.before_save = full
    assert one.save(2) is None
    event = one.events[-1]
    assert event["kind"] == "warning"
    assert event["bytes_needed"] == verify(tmp_path / "c" / "step-00000001").total_bytes
    assert event["bytes_free"] > 0
    for part in ("step-00000002", "No space left on device", "needs at least", "failed save 1 of 3"):
        assert part in event["text"]
    one.backend.before_save = lambda: None
    assert one.save(3) is not None
    one.backend.before_save = full
    assert [one.save(4), one.save(5)] == [None, None]
    with pytest.raises(TrainingError, match="3 failed saves in a row"):
        one.save(6)
    assert names(tmp_path / "c") == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    ("number", "code", "fix"), [(1, 28, "free disk space"), (2, 30, "see that its directory can be written")]
)
def test_max_failed_saves_is_the_number_that_ends_training(tmp_path: Path, number: int, code: int, fix: str) -> None:
    one = rig(tmp_path, max_failed_saves=number)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    one.backend.before_save = fail
    assert [one.save(step) for step in range(1, number)] == [None] * (number - 1)
    with pytest.raises(TrainingError, match=rf"{number} failed saves in a row \(max_failed_saves\): {fix}, and run"):
        one.save(number)
    said = one.events[-1]["text"]
    assert said.endswith(f"; failed save {number} of {number} in a row") and ("needs at least" in said) == (code == 28)


@pytest.mark.parametrize("gone", ["run", "run/checkpoints", "run/checkpoints/step-00000001"])
def test_what_was_deleted_during_the_run_is_said_once_and_saved_again(tmp_path: Path, gone: str) -> None:
    directory = tmp_path / "run" / "checkpoints"
    one = rig(directory)
    one.save(1)
    assert not one.store.is_lost()
    shutil.rmtree(tmp_path / gone)
    assert one.store.is_lost()
    assert verify(one.save(2)) and not one.store.is_lost()
    what = directory / "step-00000001" if gone.endswith("1") else directory
    assert one.messages == [f"{what} was deleted while the run uses it: step-00000002 is saved in full in {directory}"]
    assert verify(one.save(3)) and len(one.messages) == 1
    assert names(directory) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_that_was_deleted_is_saved_again_at_the_same_step(tmp_path: Path) -> None:
    one = rig(tmp_path / "checkpoints")
    one.save(1)
    again = rig(tmp_path / "checkpoints")  # a resumed run knows what it has found
    again.store.resume(again.store.find())
    shutil.rmtree(tmp_path / "checkpoints")
    assert again.store.is_lost() and verify(again.save(1)) and len(again.messages) == 1


def test_a_deleted_directory_that_cannot_be_made_again_counts_as_failed_saves(tmp_path: Path) -> None:
    one = rig(tmp_path / "run" / "checkpoints", max_failed_saves=2)
    one.save(1)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file is in the way")
    assert one.save(2) is None
    deleted, failed = one.messages
    assert "was deleted while the run uses it" in deleted and "failed save 1 of 2" in failed
    with pytest.raises(TrainingError, match="2 failed saves in a row"):
        one.save(3)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_disk_failure_on_one_rank_is_a_miss_on_all_and_nobody_waits(tmp_path: Path, failing: int) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    rigs, results = _on_ranks(tmp_path, 3, failing, full, lambda one: (one.save(2), one.save(3)))
    assert results == [(None, None)] * 3
    assert "No space left" in rigs[0].messages[0]
    assert [one.events for one in rigs[1:]] == [[], []]
    assert names(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 2])
def test_a_refusal_on_one_rank_is_raised_on_all(tmp_path: Path, failing: int) -> None:
    def refuse() -> None:
        raise TrainingError("extra_state is a set")

    def save(one: Rig) -> str:
        with pytest.raises(TrainingError) as error:
            one.save(2)
        return str(error.value)

    _, results = _on_ranks(tmp_path, 3, failing, refuse, save)
    told = f"rank {failing}: extra_state is a set"
    assert results == ["extra_state is a set" if rank == failing else told for rank in range(3)]


def test_every_rank_saves_its_part_and_finds_the_same(tmp_path: Path) -> None:
    def save_and_find(one: Rig) -> Any:
        saved = one.save(2)
        return saved, one.store.find(), one.store.resume(saved)[1].step

    _, results = _on_ranks(tmp_path, 3, None, lambda: None, save_and_find)
    path = tmp_path / "step-00000002"
    assert results == [(path, path, 2)] * 3
    assert {name for name in verify(path).files if "rng" in name} == {f"rng/rank-{i}.safetensors" for i in range(3)}
    _truncate(path)
    _, results = _on_ranks(tmp_path, 3, None, lambda: None, lambda one: _error_of(lambda: one.store.open(path)))
    assert all("model.safetensors" in result for result in results)


def test_each_file_is_verified_by_one_rank_and_pieces_by_the_rank_that_loads_them() -> None:
    sizes = {
        "state.json": 9, "rng/rank-0.safetensors": 5, "model/model.safetensors": 500, "optimizer/optimizer.safetensors": 1000,
        "model/model-00001-of-00003.safetensors": 70, "model/model-00003-of-00003.safetensors": 80,
    }  # fmt: skip
    files = {name: FileRecord(size, "") for name, size in sizes.items()}
    for readers in ([0], [0, 1], [0, 2], [0, 1, 2]):
        parts = {rank: part_to_verify(files, readers, rank, 3) for rank in range(3)}
        assert sorted(name for part in parts.values() for name in part) == sorted(sizes)
        assert [rank for rank, part in parts.items() if part] == readers
        assert "model/model-00001-of-00003.safetensors" in parts[0]
        assert "model/model-00003-of-00003.safetensors" in parts[2] or 2 not in readers
    largest = [max(sum(record.bytes for record in part.values()) for part in parts.values())]
    assert largest == [1000], "the ranks have even parts"


def test_a_flipped_bit_anywhere_makes_all_ranks_resume_from_the_checkpoint_before(tmp_path: Path) -> None:
    generator = random.Random(3)
    for size in (1, 40, 5000):
        directory = tmp_path / str(size)

        def save(one: Rig) -> None:
            one.backend.weights = bytes([1]) * size  # noqa: B023
            one.save(1)
            one.backend.weights = bytes([2]) * size  # noqa: B023
            one.save(2)

        _on_ranks(directory, 2, None, lambda: None, save)
        files = sorted(f for f in (directory / "step-00000002").rglob("*") if f.is_file())
        for file in files:
            content = file.read_bytes()
            for at in {0, len(content) - 1, *(generator.randrange(len(content)) for _ in range(4))}:
                damaged = bytearray(content)
                damaged[at] ^= 1 << generator.randrange(8)
                file.write_bytes(damaged)
                rigs, results = _on_ranks(directory, 2, None, lambda: None, _find_and_load)
                assert results == [1, 1], (file, at)
                assert [one.backend.loaded[0] for one in rigs] == [bytes([1]) * size] * 2
                (warning,) = rigs[0].messages
                assert file.name in warning
                (directory / "damaged-step-00000002").rename(directory / "step-00000002")
            file.write_bytes(content)
        assert _on_ranks(directory, 2, None, lambda: None, _find_and_load)[1] == [2, 2]


def _find_and_load(one: Rig) -> int:
    found = one.store.find()
    assert one.backend.loaded is None, "loaded before every file was verified"
    return one.store.resume(found)[1].step


def _error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        action()
    return str(error.value)


def _on_ranks(
    directory: Path, size: int, failing: int | None, fault: Callable[[], None], action: Callable[[Rig], Any]
) -> tuple[list[Rig], list[Any]]:
    threads = Threads(size)
    rigs = [rig(directory, rank, threads) for rank in range(size)]
    if failing is not None:
        rigs[failing].backend.before_save = fault
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = action(rigs[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for the others"
    return rigs, results


def test_a_state_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    one = rig(tmp_path)
    with pytest.raises(TrainingError, match=r"train\.callbacks\.mine is a builtins\.set"):
        one.save(1, callbacks={"mine": {1, 2}})
    one.backend.extra = {"scheduler": object()}
    with pytest.raises(TrainingError, match="object"):
        one.save(1)
    assert names(tmp_path) == []


def _reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the manifest as a forger would, its own digest included."""
    content = json.loads((path / "manifest.json").read_bytes())
    content.pop("xxh3_128")
    change(content)
    body = json.dumps(content, indent=1)[:-2].encode()
    seal = manifest.xxhash.xxh3_128_hexdigest(body).encode()
    (path / "manifest.json").write_bytes(body + manifest._SEAL + seal + b'"\n}\n')


def _name_outside(path: Path) -> None:
    (path.parent / "secret").write_text("x")
    _reseal(path, lambda content: content["files"].update({"../secret": {"bytes": 1, "xxh3_128": "0"}}))


def _name_absolute(path: Path) -> None:
    _reseal(path, lambda content: content["files"].update({"/etc/hostname": {"bytes": 1, "xxh3_128": "0"}}))


def _link_file(path: Path) -> None:
    file = path / "model" / "model.safetensors"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def _link_directory(path: Path) -> None:
    (path / "model").rename(path.parent / "model")
    (path / "model").symlink_to(path.parent / "model")


def _link_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path.parent / "m")
    (path / "manifest.json").symlink_to(path.parent / "m")


def _add_file(path: Path) -> None:
    (path / "model" / "custom.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/marker'\ntR.")


def _pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def _deep_json(path: Path) -> None:
    body = b"[" * 5_000_000
    seal = manifest.xxhash.xxh3_128_hexdigest(body).encode()
    (path / "manifest.json").write_bytes(body + manifest._SEAL + seal + b'"\n}\n')


def _huge_header(path: Path) -> None:
    file = path / "model" / "model.safetensors"
    content = (1 << 40).to_bytes(8, "little") + file.read_bytes()[8:]
    file.write_bytes(content)
    record = {"bytes": len(content), "xxh3_128": file_digest(file)}
    _reseal(path, lambda manifest: manifest["files"].update({"model/model.safetensors": record}))


def _huge_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 1 << 40)


def _wrong_types(path: Path) -> None:
    _reseal(path, lambda content: content.update({"step": "DROP TABLE"}))


HOSTILE = [
    _name_outside, _name_absolute, _link_file, _link_directory, _link_manifest, _add_file, _pipe, _deep_json,
    _huge_header, _huge_manifest, _wrong_types,
]  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__.strip("_"))
def test_a_hostile_checkpoint_is_refused_quickly(tmp_path: Path, attack: Callable[[Path], None]) -> None:
    path = rig(tmp_path / "c").save(1)
    attack(path)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError):
        verify(path)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"train": 1, "backend": {}}', b"\x80\x04", b"[" * 100_000])
def test_a_state_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(tmp_path)


def test_a_state_that_does_not_fit_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(tmp_path)
    path = one.save(1)
    monkeypatch.setattr(one.backend, "load", lambda directory, state: int(state["world_size"]))
    with pytest.raises(CheckpointError, match=r"its state does not fit this run \(KeyError: 'world_size'\)"):
        one.store.resume(path)

    def load(directory: Path, state: Mapping[str, Any]) -> None:
        raise ValueError("name \x1b[2J")

    monkeypatch.setattr(one.backend, "load", load)
    with pytest.raises(CheckpointError) as found:
        one.store.resume(path)
    assert str(found.value.__cause__) == r"name \x1b[2J"


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value, said in ((deep, "more than 100 deep"), (10**400, "401 digits")):
        with pytest.raises(TrainingError, match=said):
            rig(tmp_path).save(1, callbacks={"mine": value})
    assert names(tmp_path) == []


def test_an_array_is_not_read_many_times(tmp_path: Path) -> None:
    path = rig(tmp_path).save(1, callbacks={"mine": numpy.zeros(4)})
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"mine": ', '"other": {"__array__": "0"}, "mine": '))
    with pytest.raises(CheckpointError, match=r"state\.json is not a training state"):
        read_state(path)


def test_listing_and_verifying_load_no_framework(tmp_path: Path) -> None:
    rig(tmp_path).save(1)
    code = (
        "import sys; from pathlib import Path; from distributed.checkpoints.manifest import list_checkpoints;"
        "from distributed.checkpoints.verifying import verify;"
        "[verify(i.path) for i in list_checkpoints(Path(sys.argv[1]))];"
        "import distributed.checkpoints.store, distributed.cli.checkpoint;"
        "sys.exit(bool({'torch', 'numpy', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30, check=False).returncode == 0


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    chunks = [b"a" * 20, b"", b"b" * 10]
    durable.write_file(tmp_path / "x", chunks, 30)
    assert (tmp_path / "x").read_bytes() == b"a" * 20 + b"b" * 10


def test_large_and_small_chunks_keep_their_order(tmp_path: Path) -> None:
    chunks = [b"1" * 10, memoryview(b"2" * (3 << 20)), b"3" * (1 << 19), b"4" * (1 << 19), b"5" * 5]
    durable.write_file(tmp_path / "x", chunks, sum(map(len, chunks)))
    assert (tmp_path / "x").read_bytes() == b"".join(map(bytes, chunks))


@pytest.mark.parametrize("seed", range(5))
def test_tensors_begin_where_copies_are_fast(tmp_path: Path, seed: int) -> None:
    """Those of whole cache lines at a multiple of 64 bytes, all others at a multiple of their elements."""
    rng = random.Random(seed)
    words = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1}
    tensors = []
    for number in range(30):
        word, length = rng.choice(list(words)), rng.choice([1, 3, 10, 64, 128, 4096])
        content = rng.randbytes(words[word] * length)
        tensors.append(RawTensor(f"t{number}", word, (length,), lambda content=content: content))
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors, {"some": "data" * rng.randrange(20)})

    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    begins = {
        name: entry["data_offsets"][0]
        for name, entry in json.loads(raw[8 : 8 + size]).items()
        if name != "__metadata__"
    }
    for tensor in tensors:
        begin = 8 + size + begins[tensor.name]
        assert begin % (64 if tensor.num_bytes % 64 == 0 else words[tensor.dtype]) == 0
    found, _ = read_raw(path)
    assert {each.name: bytes(each.read()) for each in found} == {each.name: each.read() for each in tensors}
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == {each.name for each in tensors}


if __name__ == "__main__":
    os.fsync = lambda fd: None  # a killed process loses nothing that it wrote; without waiting, kills fall everywhere
    _kill_saves(Path(sys.argv[1]), int(sys.argv[2]), globals()[sys.argv[3]])
