"""`checkpoint_async`: what is copied is what is committed, later, by all ranks or by none."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.backends._torch.copying import TorchCopying
from distributed.backends._torch.whole import free_bytes
from distributed.callbacks import Callback
from distributed.checkpoints import durable, staging
from distributed.checkpoints.background import BackgroundSave
from distributed.checkpoints.directory import CheckpointDirectory, stage_of
from distributed.checkpoints.manifest import list_checkpoints
from distributed.checkpoints.staging import Staging
from distributed.checkpoints.tensor_file import read_raw
from distributed.checkpoints.verifying import verify
from distributed.config import memory
from distributed.errors import ConfigError, TrainingError
from distributed.state import TrainState
from distributed.training import files
from tests.unit.test_checkpoint import Rig, _on_ranks, names, rig

SCRIPT = """
import sys
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 2))

if __name__ == "__main__":
    inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    Trainer(model, batch_size=4, epochs=1, checkpoint_every_n_steps=4, keep_latest_k=2).fit(data)
"""


def begin(one: Rig, step: int, when_over: Callable[[], None] = lambda: None) -> bool:
    return one.store.save_in_background(TrainState(step=step, samples_seen=step * 10), {"epochs": 1}, None, when_over)


@pytest.mark.parametrize("size", [1, 2])
def test_the_checkpoint_has_what_was_copied_and_the_files_of_a_save_at_once(tmp_path: Path, size: int) -> None:
    def at_once(one: Rig) -> Path | None:
        return one.save(3)

    def in_background(one: Rig) -> Any:
        told: list[int] = []
        assert begin(one, 3, lambda: told.append(one.backend.rank))
        one.backend.weights = b"later" * 40
        path = one.store.finish()
        assert told == ([0] if one.backend.rank == 0 else [])
        return path, one.store.find(), one.store.resume(path)[1].step, one.backend.loaded[0]

    _, (path, *_) = _on_ranks(tmp_path / "a", size, None, lambda: None, at_once)
    _, results = _on_ranks(tmp_path / "b", size, None, lambda: None, in_background)
    other = tmp_path / "b" / path.name
    assert results == [(other, other, 3, b"\x01\x02\x03\x04" * 64)] * size
    assert verify(other).files == verify(path).files
    assert names(tmp_path / "b") == [path.name]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_in_the_background_is_a_miss_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    _on_ranks(tmp_path, 2, None, lambda: None, lambda one: one.save(1))
    write = durable._write_all

    def full(output: Any, chunks: Any) -> None:
        if f"rank-{failing}.safetensors" in str(Path(f"/proc/self/fd/{output.fd}").readlink()):
            raise OSError(28, "No space left on device")
        write(output, chunks)

    monkeypatch.setattr(durable, "_write_all", full)

    def twice_then_a_third(one: Rig) -> Any:
        found = []
        for step in (2, 3):
            assert begin(one, step)
            found.append(one.store.finish())
        assert begin(one, 4)
        with pytest.raises(TrainingError, match="3 failed saves in a row"):
            one.store.finish()
        return found

    rigs, results = _on_ranks(tmp_path, 2, None, lambda: None, twice_then_a_third)
    assert results == [[None, None]] * 2
    assert "No space left on device" in rigs[0].messages[0]
    assert names(tmp_path) == ["step-00000001"]
    monkeypatch.setattr(durable, "_write_all", write)
    _, results = _on_ranks(tmp_path, 2, None, lambda: None, lambda one: begin(one, 5) and one.store.finish())
    assert results == [tmp_path / "step-00000005"] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_copy_before_the_save_begins_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """To copy is a collective of some engines, which would time out while the main process waits for a slow disk."""
    copied: list[int] = []
    all_copied = threading.Event()

    def full(self: CheckpointDirectory, target: Path) -> None:
        assert all_copied.wait(20)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointDirectory, "begin", full)

    def copy(rank: int) -> None:
        copied.append(rank)
        if len(copied) == size:
            all_copied.set()

    def act(one: Rig) -> bool:
        one.backend.before_save = lambda: copy(one.backend.rank)
        return begin(one, 1)

    rigs, results = _on_ranks(tmp_path, size, None, lambda: None, act)
    assert results == [False] * size and sorted(copied) == [*range(size)]
    assert ["No space left on device" in text for text in rigs[0].messages] == [True]
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [1, 3])
def test_a_state_that_is_stored_already_is_not_written_again(tmp_path: Path, size: int) -> None:
    def twice(one: Rig) -> Any:
        told: list[int] = []
        path = one.store.finish() if begin(one, 7) else None
        before = (tmp_path / "step-00000007").stat().st_ino
        one.backend.weights = b"other"  # which shows if they are written
        assert begin(one, 7, lambda: told.append(one.backend.rank))
        assert one.store.finish() == path
        assert told == ([0] if one.backend.rank == 0 else [])
        return path, before == path.stat().st_ino, one.store.resume(path)[1].step, one.backend.loaded[0]

    _, results = _on_ranks(tmp_path, size, None, lambda: None, twice)
    assert results == [(tmp_path / "step-00000007", True, 7, b"\x01\x02\x03\x04" * 64)] * size
    assert names(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stage_that_is_deleted_during_a_save_becomes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """The files that are written afterwards are not taken for the whole checkpoint."""
    seal = CheckpointDirectory.seal

    def delete_a_part(self: CheckpointDirectory, target: Path, *args: Any) -> None:
        shutil.rmtree(stage_of(target) / "rng")
        seal(self, target, *args)

    monkeypatch.setattr(CheckpointDirectory, "seal", delete_a_part)
    one = rig(tmp_path)
    assert (begin(one, 1) and one.store.finish()) is None if is_async else one.save(1) is None
    (text,) = one.messages
    assert "rng/rank-0.safetensors was deleted before the checkpoint was complete" in text
    assert names(tmp_path) == []


def test_a_save_that_a_rank_did_not_finish_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(one: Rig) -> None:
        if one.backend.rank == 1:
            one.store._staging.write = lambda: time.sleep(0.5) or {}  # its thread is slow, and training fails
        assert begin(one, 2)
        if one.backend.rank == 0:
            one.store.give_up()

    _on_ranks(tmp_path, 2, None, lambda: None, fail)
    assert names(tmp_path) == []


def test_any_error_in_the_thread_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(tmp_path)
    monkeypatch.setattr(one.store, "_commit", lambda *args: 1 / 0)
    assert begin(one, 1)
    with pytest.raises(TrainingError, match="ZeroDivisionError"):
        one.store.finish()
    assert names(tmp_path) == []


def test_memory_is_kept_for_the_next_save_and_refused_if_there_is_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    kept = Staging(lambda size: allocated.append(size) or staging.host_memory(size))
    for content in (b"abc" * 100, b"xy" * 100, b"z" * 300):
        with kept.copying(tmp_path):
            durable.write_file(tmp_path / "a", [content[:7], memoryview(content)[7:]], len(content))
        (record,) = kept.write().values()
        assert (tmp_path / "a").read_bytes() == content
        assert record.bytes == len(content)
        (tmp_path / "a").unlink()
    assert allocated == [300]
    monkeypatch.setattr(staging, "available_bytes", lambda: 1000)
    one = rig(tmp_path / "c")
    one.backend.weights = bytes(5000)
    with pytest.raises(
        TrainingError, match=r"needs 5\.\d kB of memory .* 1\.0 kB are available: set checkpoint_async=False"
    ):
        begin(one, 1)
    assert not (tmp_path / "c").exists()


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    of_machine = memory.available_bytes()
    assert of_machine is not None and of_machine > 5000
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("7000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\nfile 3000\ninactive_file 2000\nactive_file 1000\nshmem 0\n")
    assert memory.available_bytes() == 5000  # what the group has left, and 3000 bytes of files that Linux gives up
    assert free_bytes(torch.device("cpu"), 2) == 2500
    staging.check_memory(5000)
    with pytest.raises(TrainingError, match=r"needs 5\.0 kB of memory .* 5\.0 kB are available"):
        staging.check_memory(5001)
    (tmp_path / "memory.max").write_text("max\n")
    assert (memory.available_bytes() or 0) > 5000
    (tmp_path / "memory").mkdir()  # version 1
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("8000\n")
    (tmp_path / "memory/memory.stat").write_text("active_file 1\ntotal_inactive_file 2000\ntotal_active_file 1000\n")
    assert memory.available_bytes() == 4000
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert (memory.available_bytes() or 0) > 5000


OPTIMIZERS = {
    "sgd": torch.optim.SGD, "momentum": lambda params: torch.optim.SGD(params, momentum=0.9), "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True), "adam": torch.optim.Adam,
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True), "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax, "adadelta": torch.optim.Adadelta,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_memory_of_the_copy_is_known_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """The memory asked for at the start has the size of the tensors of the last checkpoint, without the steps of the parameters."""
    monkeypatch.chdir(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(files, "check_memory", asked.append)
    directory, _, _ = trained(is_async=True, optimizer=OPTIMIZERS[name], verbose=True)
    (last,) = list_checkpoints(directory / "checkpoints")[-1:]
    files_of_tensors = [*last.path.glob("model/*.safetensors"), *last.path.glob("optimizer/*.safetensors")]
    stored = [tensor for file in files_of_tensors for tensor in read_raw(file)[0]]
    large = sum(tensor.num_bytes for tensor in stored if not tensor.name.endswith((".step", ".mu_product")))
    # Adagrad has its state from the start.
    assert asked == [sum(tensor.num_bytes for tensor in stored) if name == "adagrad" else large]
    assert (
        f"checkpoint_async keeps a copy of the state in memory: about {durable.size_text(asked[0])} on each of 1"
        in capfd.readouterr().out
    )

    available = iter([asked[0] - 1])
    monkeypatch.setattr(staging, "available_bytes", lambda: next(available, 10**9))
    monkeypatch.setattr(files, "check_memory", staging.check_memory)
    with pytest.raises(TrainingError, match=r"checkpoint_async=True needs .* of memory for a copy of the state"):
        trained(is_async=True, optimizer=OPTIMIZERS[name], max_steps=1)


class Watching(Callback):
    """Record what is on the disk when the hook says that a checkpoint was saved."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        self.saved.append((state.step, verify(path).step))


def trained(*, is_async: bool, more: Sequence[Callback] = (), **settings: Any) -> tuple[Path, Any, Watching]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    watching = Watching()
    given = {"backend": "single", "checkpoint_every_n_steps": 2, "keep_latest_k": 20, "verbose": False, **settings}
    trainer = Trainer(model, callbacks=[watching, *more], batch_size=4, epochs=1, checkpoint_async=is_async, **given)
    return Path(trainer.fit(data).run_dir), trainer, watching


def test_a_fit_has_the_checkpoints_weights_and_events_of_one_that_saves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = {is_async: trained(is_async=is_async) for is_async in (False, True)}
    steps = [2, 4, 6, 8, 10, 12]
    for directory, _, watching in runs.values():
        assert watching.saved == [(step, step) for step in steps]
        events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        saved = [(each["step"], each["checkpoint"]) for each in events if each["event"] == "checkpoint_saved"]
        assert saved == [(step, f"step-{step:08d}") for step in steps]
    kinds = [list_checkpoints(directory / "checkpoints") for directory, *_ in runs.values()]
    for one, other in zip(*kinds, strict=True):
        alike = [name for name in verify(one.path).files if name != "state.json"]  # which has times
        assert alike
        assert all(verify(one.path).files[name] == verify(other.path).files[name] for name in alike)
    run = runs[True][0]
    _, again, _ = trained(is_async=True, resume_from_checkpoint=str(run / "checkpoints" / "step-00000006"))
    weights = [trainer.model.state_dict() for trainer in (runs[False][1], runs[True][1], again)]
    for name, tensor in weights[0].items():
        assert all(torch.equal(tensor, other[name]) for other in weights[1:])


def test_a_fit_keeps_no_copy_and_no_weak_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to swap tensors that have weak references, as `module.double()` does with tensor subclasses."""
    monkeypatch.chdir(tmp_path)
    kept: list[weakref.ref[Any]] = []

    def allocate(self: Any, num_bytes: int) -> memoryview:
        memory = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        kept.append(weakref.ref(memory))
        return memory.data

    monkeypatch.setattr(TorchCopying, "allocate", allocate)
    _, trainer, _ = trained(is_async=True)
    assert [weakref.getweakrefcount(parameter) for parameter in trainer.model.parameters()] == [0] * 4
    assert len(kept) >= 3 and not any(each() is not None for each in kept)


def test_a_save_in_the_background_that_fails_is_made_good_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real, calls = Staging.write, []

    def failing(self: Staging) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(self)

    monkeypatch.setattr(Staging, "write", failing)
    directory, _, watching = trained(is_async=True, checkpoint_every_n_steps=12)
    assert watching.saved == [(12, 12)]
    assert [info.step for info in list_checkpoints(directory / "checkpoints")] == [12]


def test_training_goes_on_beside_a_write_and_the_next_save_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write ends only when training waits for it, which is at the next save."""
    monkeypatch.chdir(tmp_path)
    write, wait, is_waited_for = Staging.write, BackgroundSave.wait, threading.Event()
    running: list[int] = []
    steps: list[int] = []

    class Steps(Callback):
        def on_step_end(self, state: TrainState, result: Any) -> None:
            if not is_waited_for.is_set():
                steps.append(state.step)

    def slow(self: Staging) -> Any:
        assert not running, "two saves at once"
        running.append(1)
        try:
            assert is_waited_for.wait(60)
            return write(self)
        finally:
            running.pop()

    def waiting(self: BackgroundSave) -> None:
        is_waited_for.set()
        wait(self)

    monkeypatch.setattr(Staging, "write", slow)
    monkeypatch.setattr(BackgroundSave, "wait", waiting)
    directory, _, watching = trained(is_async=True, checkpoint_every_n_steps=4, more=(Steps(),))
    assert steps == list(range(1, 9))
    assert watching.saved == [(4, 4), (8, 8), (12, 12)]
    assert [info.step for info in list_checkpoints(directory / "checkpoints")] == [4, 8, 12]


COUNTING = """
import json, time
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

calls = []
for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list", "barrier",
             "gather", "gather_object", "reduce", "reduce_scatter_tensor", "scatter", "all_to_all_single", "monitored_barrier"):
    def counted(*args, real=getattr(dist, name), name=name, **settings):
        calls.append(name)
        return real(*args, **settings)
    setattr(dist, name, counted)

class Count(Callback):
    # Stops when a save has been committed between two others, and three steps are over since.
    def __init__(self):
        self.of_step, self.committed_at = [[]], None
    def on_step_end(self, state, result):
        time.sleep(0.01)  # as an update that takes this long
        self.of_step.append(calls.copy())
        calls.clear()
        if self.committed_at and state.step == self.committed_at + 3:
            self.context.stop("counted")
    def on_checkpoint(self, state, path):
        now = len(self.of_step)  # the step that is running
        if not self.committed_at and 10 < now % 50 < 40:
            self.committed_at = now

count = Count()
trainer = Trainer(
    torch.nn.Linear(4, 1), loss_fn=torch.nn.functional.mse_loss, global_batch_size=8, epochs=1, checkpoint_every_n_steps=50,
    log_every_n_steps=10**6, callbacks=[count],
)
trainer.fit(TensorDataset(torch.randn(16000, 4), torch.randn(16000, 1)))
if trainer.is_main_process:
    print("counted", json.dumps([count.committed_at, count.of_step]))
"""


def test_ranks_agree_on_the_end_of_a_save_without_a_collective_of_its_own(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """A step in which a save is committed has the collectives of any other step. A save itself has some."""
    (tmp_path / "train.py").write_text(COUNTING)
    flags = ["--backend", "pytorch-ddp", "--nproc-per-node", "2", "--set", "checkpoint_async=true"]
    done = run_cli(["train", "--script", str(tmp_path / "train.py"), *flags, "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 0, done.output
    committed_at, of_step = json.loads(done.stdout.split("counted ")[1].splitlines()[0])
    assert committed_at, "no save was committed between two others"
    window = range(committed_at - committed_at % 50 + 2, committed_at + 3)
    assert of_step[window[0] - 1] and [of_step[step] for step in window] == [of_step[3]] * len(window)


def test_backends_that_write_at_once_refuse_it() -> None:
    for backend in ("ray", "horovod", "tensorflow"):
        with pytest.raises(ConfigError, match="checkpoint_async=True does not work with backend="):
            Trainer(torch.nn.Linear(2, 2), backend=backend, checkpoint_async=True)
    with pytest.raises(ConfigError, match=r"checkpoint_async=True .* backend='deepspeed' with native_checkpoint"):
        Trainer(
            torch.nn.Linear(2, 2), backend="deepspeed", checkpoint_async=True, deepspeed={"native_checkpoint": True}
        )


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        ("single", 3),
        pytest.param("deepspeed", 2, marks=pytest.mark.conformance),
        *(pytest.param(name, 12, marks=pytest.mark.full) for name in ("single", "pytorch-ddp", "fsdp", "deepspeed")),
    ],
)
def test_a_killed_run_resumes_and_ends_bit_for_bit_as_one_that_saves_at_once(
    start: Callable[..., Any], run_cli: Callable[..., Any], tmp_path: Path, backend: str, kills: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    processes = ["--nproc-per-node", "1" if backend == "single" else "2"]
    command = ["train", "--script", str(tmp_path / "train.py"), "--backend", backend, *processes]
    done = run_cli([*command, "--run-dir", str(tmp_path / "once")], timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output
    (tmp_path / "killed").mkdir()
    asynchronous = [*command, "--run-dir", str(tmp_path / "killed"), "--resume", "--set", "checkpoint_async=true"]
    generator, checkpoints, killed = random.Random(5), tmp_path / "killed" / "checkpoints", 0
    for _ in range(kills):
        before = names(checkpoints) if checkpoints.exists() else []
        running = start([sys.executable, "-m", "distributed.cli", *asynchronous], cwd=tmp_path)
        deadline = time.monotonic() + 60
        while running.process.poll() is None and time.monotonic() < deadline:
            if checkpoints.exists() and names(checkpoints) != before:
                break
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.02))  # when the kill falls is what this test varies
        killed += running.process.poll() is None
        running.kill()
    done = run_cli(asynchronous, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert killed
    ends = [list_checkpoints(tmp_path / name / "checkpoints")[-1].path for name in ("once", "killed")]
    files = [verify(path).files for path in ends]
    assert {name for name in files[0] if files[0][name] != files[1][name]} == {"state.json"}, (
        "weights, optimizer or rng differ"
    )
