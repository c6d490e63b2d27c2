"""Temporary directories: for their owner alone, and gone where their owner was killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from distributed.runs import temporary
from distributed.runs.processes import FIRST_NAMESPACES, identity_of
from distributed.runs.temporary import claim, remove_leftovers, temporary_directory
from tests.conftest import poll

pytestmark = pytest.mark.timeout(30)

OWNER = """
import sys, time
from pathlib import Path
from distributed.runs.temporary import claim
path = claim(Path(sys.argv[1]))
(path / "data").mkdir()
(path / "data" / "set").write_text("private")
(path / "data" / "link").symlink_to(sys.argv[2])
print("made", flush=True)
time.sleep(100)
"""


@pytest.fixture
def left(start, tmp_path):
    """A directory of a process that runs, and that process."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    command = start([sys.executable, "-c", OWNER, str(tmp_path / "ray-left"), str(tmp_path / "elsewhere")])
    command.wait_for("made")
    return tmp_path / "ray-left", command


def test_what_a_killed_process_left_is_removed_by_the_next_start_and_nothing_before(left, tmp_path):
    path, command = left
    remove_leftovers(tmp_path)
    assert (path / "data" / "set").exists()
    command.signal(signal.SIGKILL)
    command.finish()
    claim(tmp_path / "distributed-next")
    assert not path.exists() and (tmp_path / "elsewhere" / "precious").exists()
    assert (tmp_path / "distributed-next").exists()


def test_every_launch_sweeps(left, tmp_path, monkeypatch):
    from distributed.launching.forkserver import launch
    from distributed.launching.request import LaunchRequest

    path, command = left
    command.signal(signal.SIGKILL)
    command.finish()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "a_launcher", type("Launcher", (), {"serve": staticmethod(lambda request: 0)}))
    assert launch(LaunchRequest("run", launcher="a_launcher")) == 0
    assert not path.exists()


def made_by(tmp_path, name, owner):
    path = tmp_path / name
    path.mkdir(mode=0o700)
    (path / "owner").write_text(f"{owner} -")
    (path / "data").touch()
    return path


def test_a_process_id_that_came_again_is_not_its_owner(tmp_path):
    own = identity_of(os.getpid())
    earlier = own.rsplit(" ", 1)[0] + " 1"
    again, mine = made_by(tmp_path, "ray-again", earlier), made_by(tmp_path, "ray-mine", own)
    remove_leftovers(tmp_path)
    assert not again.exists() and (mine / "data").exists()


def test_one_that_only_waits_to_be_reaped_has_ended(tmp_path):
    child = os.fork()
    if child == 0:
        time.sleep(100)
    path = made_by(tmp_path, "ray-zombie", identity_of(child))
    os.kill(child, signal.SIGKILL)
    poll(lambda: identity_of(child) is None, 10, lambda: "it runs")
    remove_leftovers(tmp_path)
    assert not path.exists()
    os.waitpid(child, 0)


MACHINE_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine, whatever this test runs in. Change it by its `id` file, its `name`, and with `as_container`."""
    here = types.SimpleNamespace(id=tmp_path / "machine-id", name="node0")
    here.as_container = lambda: monkeypatch.setitem(FIRST_NAMESPACES, "pid", "pid:[1]")
    here.id.write_text(f"{MACHINE_ID}\n")
    monkeypatch.setattr(temporary, "_MACHINE_ID", here.id)
    monkeypatch.setitem(FIRST_NAMESPACES, "pid", str(Path("/proc/self/ns/pid").readlink()))
    monkeypatch.setattr(temporary.os, "uname", lambda: types.SimpleNamespace(nodename=here.name))
    return here


def left_before_a_reboot(tmp_path):
    """A directory of this process as it is found after a reboot."""
    path = claim(tmp_path / "ray-earlier")
    boot, rest = (path / "owner").read_text().split(" ", 1)
    (path / "owner").write_text(f"another-{boot} {rest}")
    return path


def test_what_a_process_before_a_reboot_left_is_removed(tmp_path, machine):
    path = left_before_a_reboot(tmp_path)
    remove_leftovers(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("change", ["id", "name", "container"])
def test_what_may_be_of_another_machine_or_container_stays(tmp_path, machine, change):
    path = left_before_a_reboot(tmp_path)
    if change == "id":
        machine.id.write_text("f" * 32)
    elif change == "name":
        machine.name = "node1"
    else:
        machine.as_container()
    remove_leftovers(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("text", [None, "", "uninitialized\n"])
def test_without_an_identity_of_the_machine_it_stays(tmp_path, machine, text):
    machine.id.unlink()
    if text is not None:
        machine.id.write_text(text)
    path = left_before_a_reboot(tmp_path)
    remove_leftovers(tmp_path)
    assert path.exists()


def test_what_a_container_left_stays_where_the_machine_looks(tmp_path, machine, monkeypatch):
    with monkeypatch.context() as inside:
        inside.setitem(FIRST_NAMESPACES, "pid", "pid:[1]")
        path = left_before_a_reboot(tmp_path)
    remove_leftovers(tmp_path)
    assert path.exists()


def test_a_process_lives_on_when_its_machine_gets_another_name(tmp_path, machine):
    path = claim(tmp_path / "ray-mine")
    machine.name = "node1"
    remove_leftovers(tmp_path)
    assert path.exists()


def test_what_is_not_surely_ours_stays(tmp_path):
    own = identity_of(os.getpid())
    boot, namespace, _, _ = own.split()
    ended = f"{boot} {namespace} 999999999 1"
    elsewhere = [
        f"another-boot {namespace} 999999999 1",
        f"{boot} pid:[1] 999999999 1",
        "",
        "words",
        "999999999",
        "a b c d e",
        f"{boot} {namespace} 999999999 1 - -",
    ]
    stays = [made_by(tmp_path, f"distributed-{number}", owner) for number, owner in enumerate(elsewhere)]
    stays.append(made_by(tmp_path, "another-name", ended))
    open_to_all = made_by(tmp_path, "ray-open", ended)
    open_to_all.chmod(0o777)
    target = made_by(tmp_path, "target", ended)
    (tmp_path / "ray-link").symlink_to(target)
    linked = made_by(tmp_path, "ray-owner", "")
    (linked / "owner").unlink()
    (linked / "owner").symlink_to(target / "owner")
    (tmp_path / "ray-file").write_text(ended)
    without = tmp_path / "ray-without"
    without.mkdir(mode=0o700)
    remove_leftovers(tmp_path)
    assert all((path / "data").exists() for path in (*stays, open_to_all, target, linked)) and without.exists()
    assert (tmp_path / "ray-link").is_symlink() and (tmp_path / "ray-file").exists()
    remove_leftovers(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_what_another_user_made_stays(tmp_path):
    boot, namespace, _, _ = identity_of(os.getpid()).split()
    path = made_by(tmp_path, "ray-theirs", f"{boot} {namespace} 999999999 1")
    os.chown(path, 65534, 65534)
    remove_leftovers(tmp_path)
    assert (path / "data").exists()


def test_a_temporary_directory_is_empty_for_its_owner_alone_and_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_directory() as path:
        assert list(path.iterdir()) == [] and path.parent.stat().st_mode & 0o777 == 0o700
        (path / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_of_the_package_makes_one():
    package = Path(temporary.__file__).parents[1]
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(
            word in path.read_text() for word in ("TemporaryDirectory(", "mkdtemp(", "mkstemp(", "NamedTemporaryFile(")
        )
    }
    assert found == set(), "use distributed.runs.temporary"
