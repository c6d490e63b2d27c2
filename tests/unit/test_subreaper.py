"""A process below a subreaper leaves no descendant, however that detached itself; nor does it outlive its launcher."""

from __future__ import annotations

import signal
import sys

from distributed.runs.processes import is_running
from tests.conftest import poll

# Starts a grandchild in a session of its own, reports it, and then does what its argument says.
JOB = """
import os, subprocess, sys, time
from pathlib import Path
from distributed.launching.subreaper import Subreaper

def work(on_event):
    print("noise")
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 100 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    on_event({"orphan": int(orphan), "me": os.getpid()})
    if sys.argv[1] == "stays":
        time.sleep(100)

scratch = Path(sys.argv[2]) / "scratch"
scratch.mkdir()
subreaper = Subreaper(work, Path(sys.argv[2]) / "log", scratch)
(first,) = subreaper.read()
print(first["orphan"], first["me"], flush=True)
if sys.argv[1] == "stays":
    time.sleep(100)
assert subreaper.read() is None
subreaper.end()
"""


def test_what_is_left_of_it_is_killed_when_it_ends(run_python, tmp_path):
    done = run_python(["-c", JOB, "ends", str(tmp_path)])  # fails where a process is left
    assert done.returncode == 0, done.output
    assert "noise" not in done.output and (tmp_path / "log").read_text() == "noise\n"
    assert not (tmp_path / "scratch").exists()


def test_it_ends_with_a_launcher_that_is_killed(start, tmp_path):
    command = start([sys.executable, "-c", JOB, "stays", str(tmp_path)])
    pids = [int(pid) for pid in command.wait_for(lambda: command.output.endswith("\n") and command.output).split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    command.signal(signal.SIGKILL)
    command.finish(10)
    poll(lambda: not any(map(is_running, pids)), 10, lambda: f"{pids} live on")
    poll(lambda: not (tmp_path / "scratch").exists(), 10, lambda: "its files are left")
