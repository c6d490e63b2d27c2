"""Train under random faults for some time, and check that nothing was lost and that nothing is left.

    python -m tests.faults.soak --minutes 30 --jobs 200    # what `make soak` runs, as root
    python -m tests.faults.soak --minutes 2 --every 5 --kinds fsdp --seed 3

Each run is in network namespaces of its own, with private shared memory and temporary directories, so whatever is found there
afterwards was left by the run. Its weights are compared bit for bit with those of the same run without a fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import Started, clean_environment, describe, poll
from tests.machines import Machines

JOB = Path(__file__).with_name("soak_job.py")
PORT = "29577"
RECOVERS_S = 60.0  # within which a new step must come after a fault
SLOW_S = 12.0  # the output of a run that takes longer is printed


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run: two processes, on one or two nodes. Two nodes share the directory of the checkpoints, and nothing else."""

    name: str
    backend: str
    num_nodes: int = 1
    loaders: int = 0
    is_async: bool = False  # whether checkpoints are written in the background


KINDS = {
    each.name: each
    for each in (
        Kind("pytorch-ddp", "pytorch-ddp", loaders=1),
        Kind("fsdp", "fsdp", is_async=True),
        Kind("two-nodes", "pytorch-ddp", num_nodes=2, is_async=True),
    )
}


class Run:
    """A run of two processes in namespaces of its own, which faults can be injected into.

    Args:
        kind: what is run.
        directory: an empty directory.
        steps: number of updates.
        wait_s: seconds added to each update.
        seed: of the faults.
    """

    def __init__(self, kind: Kind, directory: Path, steps: int, wait_s: float, seed: int) -> None:
        self.kind, self.steps, self.random = kind, steps, random.Random(seed)
        self._env = {"STEPS": str(steps), "WAIT_S": str(wait_s), "LOADERS": str(kind.loaders)}
        self._directory = directory
        self.machines = Machines(directory, kind.num_nodes)
        self._sizes: dict[int, tuple[int, int]] = {}  # launcher -> threads and files that it first had
        self.growth = 0  # threads and files by which a launcher has grown since
        self.launchers: list[Started] = []
        try:
            for number, home in enumerate(self.machines.homes):
                (home / "tmp").mkdir()
                subprocess.run([*self.machines.on(number), *["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]], check=True)
            self.start_all()
        except BaseException:
            self.close()
            raise

    def begin(self, node: int, *more: str) -> Started:
        """Start the launcher of a node."""
        many = ["--num-nodes", "2", "--node-rank", node, "--master-addr", "10.99.0.1", "--master-port", PORT]
        many += ["--checkpoint-dir", self.saved]
        options = {
            "restart_on_exception": True,
            "hang_timeout": 3,
            "hang_timeout_slow": 10,
            "checkpoint_async": self.kind.is_async,
        }
        command = [
            *self.machines.on(node), sys.executable, "-m", "distributed.cli", "train", "--script", JOB, "--backend",
            self.kind.backend, "--device", "cpu", "--nproc-per-node", 2 // self.kind.num_nodes, "--run-dir", "run", "--max-restarts",
            "100000", *(f"--set={name}={str(value).lower()}" for name, value in options.items()), *(many if self.kind.num_nodes > 1 else []),
            *more,
        ]  # fmt: skip
        environ = clean_environment(**self._env, TMPDIR=str(self.machines.homes[node] / "tmp"))
        return Started(list(map(str, command)), self._directory, None, environ, fresh=True)

    def start_all(self, *more: str) -> None:
        """Start the launchers of all nodes. What the workers of a run before have written about themselves goes."""
        for home in self.machines.homes:
            for file in ("step", "worker-0", "worker-1"):
                (home / file).unlink(missing_ok=True)
        self.launchers = [self.begin(node, *more) for node in range(self.kind.num_nodes)]

    @property
    def step(self) -> int:
        """The newest update of rank 0."""
        file = self.machines.homes[0] / "step"
        return int(file.read_text() or 0) if file.exists() else 0

    @property
    def is_over(self) -> bool:
        return all(each.process.poll() is not None for each in self.launchers)

    def home(self, rank: int) -> Path:
        """Return the working directory of a rank."""
        return self.machines.homes[rank * self.kind.num_nodes // 2]

    def worker(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int((self.home(rank) / f"worker-{rank}").read_text())

    def signal(self, rank: int, number: int) -> int:
        """Send a signal to a rank, once it has started if it is starting again. Return its process id."""

        def sent() -> int:
            try:
                pid = self.worker(rank)
                os.kill(pid, number)
                return pid
            except (ProcessLookupError, ValueError):  # it has ended, or its successor is writing its file
                return 0

        return poll(sent, RECOVERS_S, lambda: f"rank {rank} does not start\n{self.output()}")

    def some_rank(self) -> int:
        return self.random.randrange(2)

    def checkpoints(self) -> list[Path]:
        return sorted(self.saved.glob("step-*"))

    @property
    def saved(self) -> Path:
        """The directory of the checkpoints."""
        return self._directory / "shared" if self.kind.num_nodes > 1 else self.machines.homes[0] / "run" / "checkpoints"

    def wait_for_end(self) -> None:
        """Wait until all processes of all launchers have ended."""
        alive = [pid for each in self.launchers for pid in each.alive()]
        poll(
            lambda: not any(each.alive() for each in self.launchers),
            60,
            lambda: f"still alive: {describe(alive)}\n{self.output()}",
        )
        for each in self.launchers:
            each.process.wait()

    def measure(self) -> None:
        """Compare the threads and open files of the launchers with those that they had when they were first looked at."""
        for each in self.launchers:
            # the launcher is the only child of nsenter, which it replaces, so it has the process id of the command
            proc = Path("/proc") / str(each.pid)
            size = len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))
            first = self._sizes.setdefault(each.pid, size)
            self.growth = max(self.growth, size[0] - first[0], size[1] - first[1])

    def results(self) -> tuple[str, float]:
        """Wait for the end and return what rank 0 prints: the weights, and the seconds of an update (median of the last attempt)."""
        ended = [each.finish(600) for each in self.launchers]
        assert [each.returncode for each in ended] == [0] * len(ended), self.output()
        weights, update_s = (ended[0].stdout.split(f"{name} ")[1].split()[0] for name in ("weights", "update_s"))
        return weights, float(update_s)

    def left(self) -> list[str]:
        """Return what the run has left behind: processes, listening ports, files, shared memory."""
        found = [f"process {pid}" for each in self.launchers for pid in each.alive()]
        for number, home in enumerate(self.machines.homes):
            ports = subprocess.run(
                [*self.machines.on(number), "ss", "-Htln"], capture_output=True, text=True, check=True
            )
            memory = subprocess.run(
                [*self.machines.on(number), "ls", "-A", "/dev/shm"], capture_output=True, text=True, check=True
            )
            found += [f"port {line}" for line in ports.stdout.splitlines()]
            found += [f"shared memory {line}" for line in memory.stdout.splitlines()]
            found += [
                f"temporary file {path.name}" for path in (home / "tmp").iterdir() if not _is_of_torch(path, self.kind)
            ]
        found += [f"file {path.name}" for path in self.saved.iterdir() if not path.name.startswith(_KEPT)]
        return found

    def output(self) -> str:
        return "\n".join(each.output[-3000:] for each in self.launchers)

    def close(self) -> None:
        """End everything."""
        for each in self.launchers:
            each.kill()
        self.machines.close()


def _is_of_torch(path: Path, kind: Kind) -> bool:
    """Return whether torch (2.13) has left a temporary file or directory that no trainer can know of.

    It makes one cache per user when it first loads its compiler, and keeps it. When a connection to a loader process breaks,
    torch.utils.data.DataLoader opens ten empty temporary files to see whether a process may open more. If the signal that the
    loader process has ended comes meanwhile, its handler raises an error, and a file stays (in about 1 of 35 kills without us).
    """
    if path.name.startswith("torchinductor_"):
        return True
    is_probe = re.fullmatch("tmp[a-z0-9_]{8}", path.name) and path.is_file() and path.stat().st_size == 0
    return kind.loaders > 0 and bool(is_probe)


_KEPT = ("step-", "damaged-", "best", "latest", ".lock")  # a lock file stays, without a lock

# --------------------------------------------------------------------- faults


def _kill(number: int) -> Callable[[Run], None]:
    def kill(run: Run) -> None:
        run.signal(run.some_rank(), number)

    return kill


def _order(fault: str, name: str = "fault") -> Callable[[Run], None]:
    """Order a fault of the job, and wait until it begins. The file appears complete."""

    def order(run: Run) -> None:
        rank = run.some_rank()
        new = run.home(rank) / "new"
        new.write_text(fault)
        file = new.rename(new.with_name(f"{name}-{rank}"))
        poll(lambda: not file.exists(), RECOVERS_S, lambda: f"nobody reads {file.name}\n{run.output()}")

    return order


def _pause(run: Run) -> None:
    pid = run.signal(run.some_rank(), signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(pid, signal.SIGCONT)


def _signal_loader(number: int) -> Callable[[Run], None]:
    def send(run: Run) -> None:
        pid = run.signal(run.some_rank(), 0)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(run.random.choice(children)), number)

    return send


def _stop(number: int) -> Callable[[Run], None]:
    """Send a signal to the launcher of node 0 and start the run again when it has ended."""

    def stop(run: Run) -> None:
        run.launchers[0].signal(number)
        run.wait_for_end()
        run.start_all("--resume")

    return stop


def _end(fault: str) -> Callable[[Run], None]:
    """Order a fault of the job that ends the run, and start the run again."""

    def end(run: Run) -> None:
        _order(fault)(run)
        run.wait_for_end()
        run.start_all("--resume")

    return end


def _replace_node(run: Run) -> None:
    for pid in run.launchers[1].alive():
        os.kill(pid, signal.SIGKILL)
    run.launchers[1].process.wait()
    run.launchers[1] = run.begin(1)


def _cut_link(run: Run) -> None:
    run.machines.link(1, "down")
    time.sleep(3.0)
    run.machines.link(1, "up")


def _damage_newest(run: Run) -> None:
    """Change a byte of the newest checkpoint and kill a worker, so that it is read."""
    for file in run.checkpoints()[-1].glob("model/*"):
        content = bytearray(file.read_bytes())
        content[run.random.randrange(len(content))] ^= 1
        file.write_bytes(content)
    run.signal(0, signal.SIGKILL)


def _delete_newest(run: Run) -> None:
    shutil.rmtree(run.checkpoints()[-1], ignore_errors=True)
    run.signal(0, signal.SIGKILL)


def _delete_all(run: Run) -> None:
    """Delete the directory of the checkpoints. Wait until it has two again, because the next fault may damage the newest one."""
    shutil.rmtree(run.saved, ignore_errors=True)
    poll(lambda: len(run.checkpoints()) > 1, RECOVERS_S, lambda: f"no new checkpoints\n{run.output()}")


FAULTS: dict[str, Callable[[Run], None]] = {
    "a worker is killed": _kill(signal.SIGKILL),
    "a worker crashes (SIGSEGV)": _kill(signal.SIGSEGV),
    "a worker is stopped (SIGSTOP)": _kill(signal.SIGSTOP),
    "a worker pauses for 1 s": _pause,
    "a callback raises an error": _order("raise"),
    "a sample cannot be read": _order("raise", "fault-of-data"),
    "reading a sample loops for ever": _order("loop", "fault-of-data"),
    "a callback loops for ever": _order("loop"),
    "a training step loops for ever": _order("loop in the next step"),
    "a collective is called by one rank only": _order("another collective"),
    "a collective has another shape on one rank": _order("another shape"),
    "the clock of a worker jumps by a week": _order("clock"),
    "a worker exits, and the run is resumed": _end("exit"),
    "a rank runs out of memory, and the run is resumed": _end("no memory"),
    "a loss is NaN, and the run is resumed": _end("nan"),
    "a save finds no space": _order("disk"),
    "SIGTERM, and the run is resumed": _stop(signal.SIGTERM),
    "SIGINT, and the run is resumed": _stop(signal.SIGINT),
    "the launcher is killed, and the run is resumed": _stop(signal.SIGKILL),
    "the newest checkpoint is damaged": _damage_newest,
    "the newest checkpoint is deleted": _delete_newest,
    "all checkpoints are deleted": _delete_all,
}
OF_LOADERS = {
    "a loader process is killed": _signal_loader(signal.SIGKILL),
    "a loader process is stopped (SIGSTOP)": _signal_loader(signal.SIGSTOP),
}
OF_NODES = {"a node is killed and replaced": _replace_node, "a link is down for 3 s": _cut_link}


def faults_of(kind: Kind) -> dict[str, Callable[[Run], None]]:
    """Return the faults that a kind of run can have."""
    return FAULTS | (OF_LOADERS if kind.loaders else {}) | (OF_NODES if kind.num_nodes > 1 else {})


# --------------------------------------------------------------------- soak


@dataclasses.dataclass
class Outcome:
    """Results of a run under faults.

    Attributes:
        recovered_s: fault -> seconds until a step that had not been reached before, for each time.
        effective: seconds of the updates that stand in the result (their number times the median update, without saves and
            restarts), as a fraction of the run's wall-clock time.
        is_same: whether the weights are those of a run without faults, bit for bit.
        left: what was found after the end.
        growth: threads and open files by which a launcher grew.
    """

    kind: str
    recovered_s: dict[str, list[float]]
    effective: float
    is_same: bool
    left: list[str]
    growth: int

    @property
    def num_faults(self) -> int:
        return sum(map(len, self.recovered_s.values()))


def soak(kind: Kind, minutes: float, every_s: float, seed: int, wait_s: float = 0.05) -> Outcome:
    """Run `kind` with a fault about every `every_s` seconds, long enough for `minutes` without faults."""
    steps = int(minutes * 60 / wait_s)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        clean = Run(kind, Path(first), steps, 0.0, seed)
        try:
            expected, _ = clean.results()
        finally:
            clean.close()
        began, run = time.monotonic(), Run(kind, Path(second), steps, wait_s, seed)
        try:
            recovered_s = dict[str, list[float]]()
            for name, seconds in _inject(run, every_s, wait_s):
                recovered_s.setdefault(name, []).append(seconds)
                print(
                    f"{kind.name:12} {time.monotonic() - began:6.0f} s  step {run.step:6}  {name}: {seconds:.1f} s",
                    flush=True,
                )
            weights, update_s = run.results()
            effective = steps * update_s / (time.monotonic() - began)
            return Outcome(kind.name, recovered_s, effective, weights == expected, run.left(), run.growth)
        finally:
            run.close()


def _inject(run: Run, every_s: float, wait_s: float) -> Iterator[tuple[str, float]]:
    """Inject faults until the run is nearly over. Yield each with the seconds until the next new step."""
    faults, deck = faults_of(run.kind), list[str]()
    _wait_for_step(run, 20)
    while run.step < run.steps - 2 * every_s / wait_s:
        deck = deck or run.random.sample(sorted(faults), len(faults))
        name = deck.pop()
        time.sleep(every_s * run.random.uniform(0.5, 1.5))
        run.measure()
        at, began = run.step, time.monotonic()
        faults[name](run)
        # A loader process reads two updates ahead, and the file may be one behind, so that three more may come before it is felt.
        _wait_for_step(run, max(at, run.step) + 4)
        if (seconds := time.monotonic() - began) > SLOW_S:
            print(f"{name} took {seconds:.1f} s:\n{run.output()}", flush=True)
        yield name, seconds


def _wait_for_step(run: Run, step: int) -> None:
    poll(
        lambda: run.step >= step,
        RECOVERS_S,
        lambda: f"no new step after {run.step}\n{run.output()}",
        lambda: run.is_over,
    )


def run_jobs(count: int, at_once: int) -> list[str]:
    """Run short jobs of two processes, `at_once` at a time. Return what went wrong."""

    def job(number: int) -> str:
        kind = [*KINDS.values()][number % 2]
        with tempfile.TemporaryDirectory() as directory:
            run = Run(dataclasses.replace(kind, loaders=0), Path(directory), 5, 0.0, 0)
            try:
                weights, _ = run.results()
                return f"{kind.name}: {run.left()}" if run.left() else weights
            except BaseException as error:  # whatever it is, the others run on
                return f"{kind.name}: {error}"
            finally:
                run.close()

    with ThreadPoolExecutor(at_once) as pool:
        ends = list(pool.map(job, range(count)))
    return [end for end in ends if end not in (ends[0], ends[1 % count])] + [end for end in ends[:2] if ":" in end]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of training, of all kinds together")
    parser.add_argument(
        "--every", type=float, default=20.0, metavar="S", help="seconds between a recovery and the next fault"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0, help="short jobs to run one after the other, then three at once")
    parser.add_argument(
        "--effective", type=float, default=0.8, help="smallest fraction of the time that must be training that stands"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the outcome")
    args = parser.parse_args(argv)
    kinds = [KINDS[name] for name in args.kinds.split(",")]
    print(f"seed {args.seed}", flush=True)
    outcomes = []
    for index, kind in enumerate(kinds):
        outcomes.append(soak(kind, args.minutes / len(kinds), args.every, args.seed + index))
        print(next(_table(outcomes[-1:])), flush=True)
    wrong = [line for outcome in outcomes for line in _wrong(outcome, args.effective)]
    for at_once, count in ((1, args.jobs), (3, args.jobs)) if args.jobs else ():
        failed = run_jobs(count, at_once)
        wrong += failed
        print(f"{count} jobs, {at_once} at once: {len(failed)} failed", flush=True)
    print(*_table(outcomes), *wrong, sep="\n")
    if args.out is not None:
        args.out.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=2))
    return 1 if wrong else 0


def _wrong(outcome: Outcome, effective: float) -> Iterator[str]:
    """Yield the promises that were broken."""
    if not outcome.is_same:
        yield f"{outcome.kind}: the weights are not those of the run without faults"
    if outcome.left:
        yield f"{outcome.kind}: left behind: {', '.join(outcome.left)}"
    if outcome.growth > 0:
        yield f"{outcome.kind}: a launcher grew by {outcome.growth} threads or files"
    if outcome.effective < effective:
        yield f"{outcome.kind}: {outcome.effective:.0%} of the time was training that stands, less than {effective:.0%}"


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        weights = "same weights" if outcome.is_same else "OTHER WEIGHTS"
        yield f"{outcome.kind}: {outcome.num_faults} faults, {outcome.effective:.0%} effective, {weights}, {len(outcome.left)} left"
        for name, seconds in sorted(outcome.recovered_s.items()):
            middle = statistics.median(seconds)
            yield f"  {name:48} {len(seconds):3} x  {min(seconds):5.1f} {middle:5.1f} {max(seconds):5.1f} s (least, median, most)"


if __name__ == "__main__":
    sys.exit(main())
