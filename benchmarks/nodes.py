"""Measure how long a run on two nodes stands still after a worker or a node was killed, or a link was cut.

sudo python benchmarks/nodes.py [--rounds 5]

The nodes are network namespaces of this machine and share no directory. Each has one process. Needs root, iproute2 and a checkout, whose
tests make the namespaces. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import machine  # noqa: E402
from tests.conftest import marked  # noqa: E402
from tests.machines import Machines  # noqa: E402

SCRIPT = """
import time
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Wait(Callback):
    def on_step_end(self, state, result):
        time.sleep(0.02)

data = TensorDataset(torch.randn(320, 4), torch.randn(320, 1))
Trainer(torch.nn.Linear(4, 1), epochs=100, global_batch_size=8, checkpoint_every_n_steps=10, log_every_n_steps=1, callbacks=[Wait()]).fit(data)
"""
FLAGS = [
    "train",
    "--script",
    "train.py",
    "--device",
    "cpu",
    "--nproc-per-node",
    "1",
    "--num-nodes",
    "2",
    "--master-addr",
    "10.99.0.1",
]
GOALS = {
    "worker killed: s to the first new step": 3.0,
    "node killed: s until it is noticed": 10.0,
    "its replacement: s to the first new step": 15.0,
    "link cut: s until it is noticed": 10.0,
}
_LIMIT_S = 60.0
_MARK = "BENCHMARK_NODE"  # variable of all processes of a node


class Run:
    """A run on two nodes."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.machines = directory, Machines(directory, 2)
        for home in self.machines.homes:
            (home / "train.py").write_text(SCRIPT)
        self._nodes = [self.begin(0), self.begin(1)]

    def until_trained(self) -> None:
        """Wait until both nodes have trained for 60 steps."""
        self.until(lambda: len(self.rows()) >= 60)

    def begin(self, rank: int) -> subprocess.Popen[bytes]:
        """Start the command of a node."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), _MARK: f"{self._directory}-{rank}"}
        command = [*self.machines.on(rank), sys.executable, "-m", "distributed.cli", *FLAGS, "--node-rank", str(rank)]
        with open(self._directory / f"out-{rank}", "ab") as out:
            return subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def rows(self) -> list[dict[str, float]]:
        """Return the lines of metrics.jsonl, without one that is still being written."""
        return [
            json.loads(line)
            for file in self.machines.homes[0].glob("runs/*/metrics.jsonl")
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def until(self, is_true: Callable[[], bool]) -> float:
        """Wait until `is_true()` and return the seconds that it took."""
        begin = time.time()
        while not is_true():
            if time.time() - begin > _LIMIT_S:
                raise TimeoutError("\n".join((self._directory / f"out-{rank}").read_text() for rank in (0, 1)))
            time.sleep(0.01)
        return time.time() - begin

    def until_new_step(self) -> float:
        """Return the seconds to the first step of the next attempt."""
        begin = time.time()
        (run,) = self.machines.homes[0].glob("runs/*")
        count = (run / "events.jsonl").read_text().count('"resumed"')
        self.until(lambda: (run / "events.jsonl").read_text().count('"resumed"') > count)
        resumed = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"resumed"' in line][
            -1
        ]["time"]
        self.until(lambda: self.rows()[-1]["time"] > resumed)
        return next(row["time"] for row in self.rows() if row["time"] > resumed) - begin

    def kill_worker(self) -> None:
        """Kill the worker of node 1: the newest of its processes."""
        os.kill(marked(f"{self._directory}-1", _MARK)[-1], signal.SIGKILL)

    def kill_node(self) -> float:
        """Kill the launcher of node 1, with which its processes end, and return the seconds until node 0 says so."""
        self._nodes[1].kill()
        self._nodes[1].wait()
        return self.until(lambda: "waiting 120 s for it" in (self._directory / "out-0").read_text())

    def cut_link(self) -> float:
        """Cut the link of node 1, and return the seconds until node 0 says that node 1 is silent."""
        self.machines.link(1, "down")
        try:
            return self.until(lambda: "has been silent for 10 s" in (self._directory / "out-0").read_text())
        finally:
            self.machines.link(1, "up")

    def replace_node(self) -> None:
        """Start node 1 again."""
        self._nodes[1] = self.begin(1)

    def close(self) -> None:
        """End the run and the nodes."""
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            node.wait()
        self.machines.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs (default: %(default)s)")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in GOALS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            run = Run(Path(directory))
            try:
                run.until_trained()
                run.kill_worker()
                times = [run.until_new_step(), run.kill_node()]
                run.replace_node()
                times += [run.until_new_step(), run.cut_link()]
            finally:
                run.close()
        for each, seconds in zip(found.values(), times, strict=True):
            each.append(seconds)
    rows = [["", "at most", "median", "range"]]
    for name, each in found.items():
        rows.append([name, f"{GOALS[name]:g}", f"{statistics.median(each):.2f}", f"{min(each):.2f}-{max(each):.2f}"])
    print(f"{machine.table(rows)}\n\n{rounds} rounds\n{machine.describe()}")
    return 0 if all(statistics.median(each) <= GOALS[name] for name, each in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
