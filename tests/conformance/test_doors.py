"""Attack a run from another user's process on the same machine. Our sockets withstand it, and the attack runs no code.

Each backend is started once and trains twice: first undisturbed, and then while a process of the user nobody attacks every socket
that the run listens on. Both trainings end in the same bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conformance.runs import FULL
from tests.conftest import ROOT, clean_environment, needs_backend

ATTACK = Path(__file__).parent / "jobs" / "doors" / "attack.py"
_SYNC_S = 15.0  # seconds; torch's rendezvous reads its state every 5 s
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


listening = load("listeners")
ROWS = {
    tuple(cell.strip() for cell in line.strip("|\n ").split("|"))
    for line in (ROOT / "docs" / "security.md")
    .read_text()
    .partition(listening.BEGIN)[2]
    .partition(listening.END)[0]
    .splitlines()
}


def ends_the_run(listener):
    """Return whether a message to the socket may end the run and so close the others. It is attacked last."""
    return listener.service == "TCPStore"


def attack(listeners, marker, can_end=False):
    """Attack the listeners as another user, and assert that no pickle of the attack is loaded.

    `can_end` says that the attack may end the run and so close its sockets.
    """
    ports = [each for each in listeners if each.port is not None]
    asked = {
        "tcp": [(each.address, each.port) for each in ports if not (can_end and ends_the_run(each))],
        "last": [(each.address, each.port) for each in ports if can_end and ends_the_run(each)],
        "unix": [each.address for each in listeners if each.port is None],
        "marker": str(marker),
    }  # fmt: skip
    command = [sys.executable, str(ATTACK), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd="/", env=clean_environment())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    deadline = time.monotonic() + (_SYNC_S if said["num_rendezvous"] else 0)
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marker.exists(), "a stranger's pickle was loaded"
    fewest = 1 if can_end else 10
    assert said["uid"] == 65534 and said["num_connected"] >= (fewest if listeners else 0), said
    if not can_end:
        assert said["num_connected"] >= 10 * len(asked["tcp"]), said
    assert said["entered"] == [], f"unix sockets that everyone can connect to: {said['entered']}"


def is_listed(start, listener):
    """Return whether docs/security.md lists the socket, with at least the access that it has."""
    return listener.service in listening.SERVICES and any(
        row[:2] == (start.name, listener.process)
        and re.sub(r" \(\d+\)$", "", row[2]) == listener.service
        and row[3] == listening.reachable(listener, start.nodes)
        for row in ROWS
        if len(row) > 3
    )


# A client of Ray, run by another user. Its mode and its token are in its environment.
CLIENT = """
import os, sys
import ray._raylet
os.setgroups([])
os.setresuid(65534, 65534, 65534)
try:
    client = ray._raylet.GcsClient(address=sys.argv[1])
    client.internal_kv_put(b"key", b"value", True, None)
    print("it is in")
except Exception as error:
    print(type(error).__name__, error)
"""


def check_token(listeners, run):
    """Assert that Ray's head refuses clients without the right token, and that no command line or file of the run contains it."""
    (head,) = listeners
    for environ in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        command = [sys.executable, "-c", CLIENT, f"127.0.0.1:{head.port}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd="/", env=clean_environment(**environ)
        )
        assert "AuthenticationError" in done.stdout or "nauthenticated" in done.stdout, done.stdout + done.stderr
    (token,) = re.findall(rb"RAY_AUTH_TOKEN=(\w{64})", Path(f"/proc/{head.pid}/environ").read_bytes())
    commands = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.pids())
    assert b"gcs_server" in commands and token not in commands
    files = [path for path in (run.directory / "run").rglob("*") if path.is_file()]
    (logs,) = re.findall(rb"--log_dir=(\S+?)\0", commands)[:1]
    files += [path for path in Path(os.fsdecode(logs)).parent.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if token in path.read_bytes()]


# One of the runs on two nodes is attacked. The others open the same sockets, and those that their engine opens on one node.
# Those of one node whose launcher and process group are those of pytorch-ddp are for `make test-full`, and so is TensorFlow, which opens
# its sockets itself.
IN_FULL = ("single", "fsdp", "deepspeed", "fit() of a script", "tensorflow")


def marks_of(name):
    if name == "ray":
        return (pytest.mark.conformance, pytest.mark.xdist_group("a cluster of Ray"))
    return FULL if name in IN_FULL else ()


ATTACKED = [name for name, start in listening.STARTS.items() if start.nodes == 1 or start.backend == "pytorch-ddp"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in ATTACKED])
def test_a_stranger_runs_nothing_and_changes_no_bit(name, tmp_path):
    """Assert that only sockets of docs/security.md listen, and that each withstands the attack while the run trains."""
    start = listening.STARTS[name]
    needs_backend(start.backend)
    (tmp_path / "private").mkdir(mode=0o700)
    marker = tmp_path / "private" / "marker"
    with listening.Run(start, tmp_path, clean_environment()) as run:
        listeners = run.listeners()
        can_end = "nodes" in name  # docs/security.md says that whoever reaches the workers' store can end the run
        attack(listeners, marker, can_end)
        if start.backend == "ray":
            check_token([each for each in listeners if each.process == "gcs_server" and each.port is not None], run)
        unknown = [each for each in listeners if each.port is not None and not is_listed(start, each)]
        assert unknown == [], "docs/security.md does not name them: scripts/listeners.py --write"
        run.go_on()
        code = run.end(120)
    assert not marker.exists()
    if can_end and code != 0:
        assert code == 1 and "somebody else wrote to the store" in run.output, run.output
        return
    assert code == 0, run.output
    assert (tmp_path / "weights-2.safetensors").read_bytes() == (tmp_path / "weights-1.safetensors").read_bytes()


def test_the_table_has_every_start_and_says_of_each_row_what_the_script_says():
    """For starts that are not attacked, compare the rows with what the script measured."""
    measured = [row for row in ROWS if row[0] in listening.STARTS]
    assert {row[0] for row in measured} == set(listening.STARTS)
    for name, _, what, *rest in measured:
        if rest:
            who, whose, can = rest
            service = listening.SERVICES[re.sub(r" \(\d+\)$", "", what)]
            assert (service.whose, service.can) == (whose, can)
            assert not (listening.STARTS[name].nodes > 1 and who == "users of this machine")
