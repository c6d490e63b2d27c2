"""The shared memory of processes that were killed while they made a tensor for other processes is removed, and no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.runs import shared_memory
from distributed.runs.shared_memory import mark_directory, mark_process, remove_shared_memory
from distributed.runs.temporary import claim, remove_leftovers, temporary_directory
from tests.conftest import Finished

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

MARKED = """
import signal, sys
from distributed.runs.shared_memory import mark_process
mark_process(sys.argv[1])
print("marked", flush=True)
signal.pause()
"""


NAMESPACES = {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "ipc")}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file system for shared memory."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(shared_memory, "FIRST_NAMESPACES", NAMESPACES)  # also if the tests run in a container
    return tmp_path / "memory"


@pytest.fixture
def marked(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Start a process that is marked in a directory."""

    def begin(directory: Path = tmp_path) -> Any:
        command = start([sys.executable, "-c", MARKED, directory])
        command.wait_for("marked")
        return command

    return begin


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def kill(process: Any) -> None:
    process.signal(signal.SIGKILL)
    process.finish()


def test_only_files_of_marked_processes_that_have_ended_are_removed(
    tmp_path: Path, memory: Path, marked: Callable[..., Any]
) -> None:
    killed, running = marked(), marked()
    kill(killed)
    left = [f"torch_{killed.pid}_4097_12", f"torch_{killed.pid}_4097"]
    stays = [
        f"torch_{running.pid}_4097_12",
        f"torch_{os.getpid()}_4097_12",
        f"torch_{killed.pid}_x",
        f"sem.{killed.pid}",
        f"torch_{killed.pid}_1_2_3",
    ]
    for name in (*left, *stays):
        (memory / name).touch()
    remove_shared_memory(tmp_path)
    assert sorted(names(memory)) == sorted(stays)
    assert [path.name for path in tmp_path.glob("process-*")] == [f"process-{running.pid}"]
    kill(running)
    remove_shared_memory(tmp_path)
    assert sorted(names(memory)) == sorted(stays[1:]) and not list(tmp_path.glob("process-*"))
    remove_shared_memory(tmp_path / "nowhere")


@pytest.mark.parametrize("is_own", [True, False])
def test_files_of_another_user_stay(
    tmp_path: Path, memory: Path, marked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    kill(killed := marked())
    (memory / f"torch_{killed.pid}_1_2").touch()
    user = os.geteuid() + (not is_own)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    remove_shared_memory(tmp_path)
    assert bool(names(memory)) != is_own


def test_files_stay_in_a_container_that_shares_the_memory_of_its_host(
    tmp_path: Path, memory: Path, marked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the same process id may belong to a process of another container."""
    for first, is_removed in (
        ({**NAMESPACES, "pid": "pid:[1]"}, False),  # a container with the memory of its host
        ({"pid": "pid:[1]", "ipc": "ipc:[1]"}, True),  # one with its own
        ({"pid": "pid:[1]", "nothing": ""}, False),  # hidden
        (NAMESPACES, True),  # outside of containers
    ):
        kill(killed := marked())
        (memory / f"torch_{killed.pid}_1_2").touch()
        monkeypatch.setattr(shared_memory, "FIRST_NAMESPACES", first)
        remove_shared_memory(tmp_path)
        assert bool(list(memory.glob(f"torch_{killed.pid}_*"))) != is_removed


def test_processes_that_are_being_killed_are_waited_for(
    tmp_path: Path, memory: Path, marked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, looks = marked(), list[int]()
    (memory / f"torch_{process.pid}_1_2").touch()
    is_running = shared_memory._is_running

    def look(pid: int, identity: str) -> bool:
        looks.append(pid)
        if len(looks) == 2:
            kill(process)
        return is_running(pid, identity)

    monkeypatch.setattr(shared_memory, "_is_running", look)
    remove_shared_memory(tmp_path, 600.0)
    assert len(looks) == 2 and not names(memory)


def test_files_of_another_process_with_the_same_id_stay(
    tmp_path: Path, memory: Path, marked: Callable[..., Any]
) -> None:
    """The process of the mark has ended, and its id belongs to another one, which is not waited for."""
    again, older = marked(), marked()
    mark = tmp_path / f"process-{again.pid}"
    mark.write_text(mark.read_text() + "1")  # another start
    (memory / f"torch_{again.pid}_1_2").touch()
    (memory / f"torch_{older.pid}_1_2").touch()
    os.utime(memory / f"torch_{older.pid}_1_2", (1, 1))  # before the process was marked
    kill(older)
    remove_shared_memory(tmp_path, 600.0)
    assert len(names(memory)) == 2 and names(tmp_path) == ["memory"]


def test_a_temporary_directory_removes_the_memory_of_its_processes(memory: Path, marked: Callable[..., Any]) -> None:
    with temporary_directory() as directory:
        kill(killed := marked(directory))
        (memory / f"torch_{killed.pid}_1_2").touch()
    assert not names(memory)


def test_so_does_the_next_start_if_the_owner_of_the_directory_was_killed(
    tmp_path: Path, memory: Path, marked: Callable[..., Any]
) -> None:
    owner = marked()
    claim(tmp_path / "distributed-left", owner.pid)
    (tmp_path / "distributed-left" / "files").mkdir()
    killed = marked(tmp_path / "distributed-left" / "files")
    (memory / f"torch_{killed.pid}_1_2").touch()
    kill(killed)
    remove_leftovers(tmp_path)
    assert names(memory)
    kill(owner)
    remove_leftovers(tmp_path)
    assert not names(memory) and not (tmp_path / "distributed-left").exists()


def test_a_directory_from_before_a_reboot_tells_nothing_about_processes(
    tmp_path: Path, memory: Path, marked: Callable[..., Any]
) -> None:
    killed = marked()
    mark = tmp_path / f"process-{killed.pid}"
    mark.write_text("another-" + mark.read_text())
    kill(killed)
    (memory / f"torch_{killed.pid}_1_2").touch()
    remove_shared_memory(tmp_path)
    assert names(memory) and not mark.exists()


def test_a_process_that_ends_by_itself_removes_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_directory", None)

    def work() -> None:
        mark_process(str(tmp_path))
        assert names(tmp_path) == [f"process-{os.getpid()}"]

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0 and not names(tmp_path) and mark_directory() is None
    mark_process(None)
    assert not names(tmp_path) and mark_directory() is None


JOB = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from distributed import Trainer

class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if not Path("killed").exists():  # in a loader process of the first attempt
            Path("killed").write_text(str(os.getpid()))
            Path(f"/dev/shm/torch_{os.getpid()}_4097_1").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        Path("seen").write_text(" ".join(os.listdir("/dev/shm")))
        return torch.zeros(8), torch.zeros((), dtype=torch.long)

Trainer(torch.nn.Linear(8, 2), epochs=1).fit(DataLoader(Samples(), batch_size=4, num_workers=1))
"""


def test_a_restart_removes_what_a_killed_loader_process_left(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    options = ["--device", "cpu", "--backend", "single", "--max-restarts", "1", "--set", "restart_on_exception=true"]
    ended = run_cli(["train", "--script", "job.py", *options], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    pid = (tmp_path / "killed").read_text()
    Path(f"/dev/shm/torch_{pid}_4097_1").unlink(missing_ok=True)
    assert (f"torch_{pid}_" not in (tmp_path / "seen").read_text()) == shared_memory._are_ids_unique()
