"""Measure the CPU time that a launcher takes while its workers train.

python benchmarks/launcher.py [--seconds 8] [--windows 5] [--ranks 1000]

The first goal compares the launcher's processes with its two workers, which train the `mlp` of overhead.py, where a step is nearly all
overhead. Each window is compared with the next one: the difference is noise. The second goal is the launcher of node 0 in a run with
many nodes, whose launchers report to it twice a second: the messages of `--ranks` workers, 8 on each node, are made here and handled as
in a run, without a network. Exits with 1 if a goal is missed by more than the noise.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from distributed.launching.hang_check import HangCheck
from distributed.launching.heartbeat import Board, Heartbeat, Phase
from distributed.launching.node_link import Round
from distributed.launching.node_reports import REPORT_S, NodeReports
from distributed.launching.request import LaunchRequest
from distributed.launching.seal import Seal
from distributed.launching.slow_check import SlowCheck
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import descendants
from goals import Goal, verdicts

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import os
import pathlib
from distributed import Callback, Trainer
from workloads import WORKLOADS

class Ready(Callback):
    def on_step_end(self, state, result):
        if state.step == 100:
            pathlib.Path(f"worker-{os.environ['RANK']}").write_text(str(os.getpid()))

mlp = WORKLOADS["mlp"]
Trainer(
    mlp.initial_model(), optimizer=mlp.optimizer, loss_fn=mlp.loss_fn, batch_size=mlp.batch_size, epochs=100_000,
    checkpoint_every_n_steps=None, callbacks=[Ready()],
).fit(mlp.data(4096))
"""
FLAGS = ["-m", "distributed.cli", "train", "--script", "train.py", "--nproc-per-node", "2", "--device", "cpu"]
SHARE, CORE = "launcher: share of the CPU time of its workers", "node 0, {} ranks: share of a core"
LIMITS = {SHARE: 0.01, CORE: 0.05}
_PER_NODE = 8
_START_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=5, help="number of windows (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1000, help="ranks of the large run (default: %(default)s)")
    asked = parser.parse_args()
    shares = measure(asked.seconds, asked.windows)
    core = [share_of_node_0(asked.ranks // _PER_NODE) for _ in range(asked.windows)]
    goals = [
        Goal(name.format(asked.ranks), LIMITS[name], found, [a - b for a, b in itertools.pairwise(found)], par=0.0)
        for name, found in ((SHARE, shares), (CORE, core))
    ]
    print(f"{verdicts(goals)}\n\n{asked.windows} windows of {asked.seconds:g} s\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


def measure(seconds: float, windows: int) -> list[float]:
    """Return in each window the CPU time of the launcher's processes, as a share of that of its two workers."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "train.py").write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}
        with (home / "out").open("wb") as out:
            launcher = subprocess.Popen([sys.executable, *FLAGS], cwd=home, env=env, stdout=out, stderr=out)
        try:
            workers = _workers(home, launcher)
            theirs = workers.union(*map(descendants, workers))
            own = {launcher.pid, *descendants(launcher.pid)} - theirs
            found = []
            for _ in range(windows):
                before = cpu_s(own), cpu_s(workers)
                time.sleep(seconds)
                found.append((cpu_s(own) - before[0]) / (cpu_s(workers) - before[1]))
            return found
        finally:
            launcher.terminate()
            launcher.wait()


def _workers(home: Path, launcher: subprocess.Popen[bytes]) -> set[int]:
    """Wait until both workers train, and return their process ids."""
    files, deadline = [home / f"worker-{rank}" for rank in (0, 1)], time.monotonic() + _START_S
    while not all(file.exists() and file.read_text() for file in files):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((home / "out").read_text())
        time.sleep(0.05)
    return {int(file.read_text()) for file in files}


def cpu_s(pids: set[int]) -> float:
    """Return the CPU seconds of processes so far, without those of their children."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def share_of_node_0(num_nodes: int, rounds: int = 20) -> float:
    """Return the CPU seconds per second that the launcher of node 0 takes for the reports of all nodes."""
    board, hearts = Board(_PER_NODE), [Heartbeat() for _ in range(_PER_NODE)]
    seals = Seal("x" * 16, "n"), Seal("x" * 16, "n")
    own = {index: index for index in range(_PER_NODE)}
    reports = NodeReports(0, 0.1, board, lambda: own, lambda: None, lambda op, patience_s=0.0, **message: None)
    reports.begin(Round(1, list(range(num_nodes)), [], None), own)
    with tempfile.TemporaryDirectory() as directory:
        request = LaunchRequest(directory, num_nodes=num_nodes, nproc_per_node=_PER_NODE, hang_timeout=60.0)
        run = RunDirectory(Path(directory))
        hangs = HangCheck(request, run, reports.workers, lambda pids: {}, lambda rank: "")
        slow = SlowCheck(run, Display(io.StringIO(), live=False), reports.workers, lambda rank: ("", ""))
        for index, heart in enumerate(hearts):
            heart.attach(board._slot(index))
        taken = 0.0
        for step in range(1, rounds + 1):
            for heart in hearts:
                heart.mark(Phase.TRAINING, step)
            values = [board.values(index) for index in own]
            lines = [
                seals[0].close({
                    "op": "progress", "round": 1, "done": False,
                    "workers": {str(_PER_NODE * node + index): each for index, each in enumerate(values)},
                })
                for node in range(num_nodes)
            ]  # fmt: skip
            begin = time.process_time()
            for node, line in enumerate(lines):
                reports.add(node, seals[1].open(line) or {})
            ranks = reports.watched
            hangs.find(ranks)
            slow.look(ranks)
            taken += time.process_time() - begin
            assert len(ranks) == _PER_NODE * num_nodes
    board.close()
    return taken / rounds / REPORT_S


if __name__ == "__main__":
    sys.exit(main())
