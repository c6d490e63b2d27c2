"""Print which sockets a run of each backend listens on, who can reach them and what a stranger could do there.

    python scripts/listeners.py                 print the table
    python scripts/listeners.py --write         write the table into docs/security.md
    python scripts/listeners.py ray fsdp        print the rows of these starts only

The script starts every backend with two processes on this machine, `fit()` in a plain script, and most backends on two nodes. It
pauses each run in the middle of training and reads from /proc which sockets its processes listen on, as `ss -tlnp` and `ss -xlp`
show them. It has to run as the same user as these processes or as root, because it reads /proc/PID/fd.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = Path(__file__).with_name("listeners_job.py")
PAGE = ROOT / "docs" / "security.md"
MARK = "DISTRIBUTED_LISTENERS"
BEGIN, END = "<!-- scripts/listeners.py --write: begin -->\n", "<!-- scripts/listeners.py --write: end -->\n"
START_S = 240.0  # time until training has begun, also on a busy machine


@dataclasses.dataclass(frozen=True)
class Service:
    """A known kind of listener. Every listener must be one of SERVICES."""

    whose: str
    can: str  # what a stranger who reaches the socket can do


_TAKE_A_PLACE = "while the run starts, take the place of a rank: end, hang or falsify the run; run no code"
_WITH_TOKEN = "nothing without the run's token, which only the environment of its processes contains"
_AT_ANY_TIME = "at any time, also with a secret: end or hang the run; while it starts, take the place of a rank and falsify the run; run no code"
_OF_NODES = (
    "nothing if the nodes share a secret: a line without a valid HMAC is not parsed, and its connection is closed and counted; without"
    " a secret, while nodes join or a lost one is waited for, take the place of a node: end, hang or falsify the run; run no code"
)
SERVICES = {
    "launcher": Service(
        "ours", "nothing: a line without a valid HMAC is not parsed, and its connection is closed and counted"
    ),
    "Ray's gRPC": Service("Ray", _WITH_TOKEN),
    "Ray's HTTP": Service("Ray", _WITH_TOKEN),
    "TCPStore": Service("torch", _AT_ANY_TIME),
    "the nodes' server": Service("ours", _OF_NODES),
    "gloo": Service("torch", _TAKE_A_PLACE),
    "Horovod's rendezvous": Service("Horovod", _TAKE_A_PLACE),
    "TensorFlow's gRPC": Service(
        "TensorFlow", "**run code as the owner of the run**: its servers run any graph that they receive"
    ),
}


@dataclasses.dataclass(frozen=True)
class Start:
    """One way to start a run of two processes."""

    name: str
    backend: str
    model: str = "torch"
    processes: int = 2
    nodes: int = 1
    is_fit: bool = False

    def commands(self, directory: Path) -> list[list[str]]:
        """Return one command for each node. The job writes its files to `directory`."""
        job = [str(JOB), self.model, str(directory)]
        if self.is_fit:
            return [[sys.executable, *job, f"backend={self.backend}", f"nproc_per_node={self.processes}"]]
        flags = ["--backend", self.backend, "--nproc-per-node", str(self.processes // self.nodes)]
        train = [sys.executable, "-m", "distributed.cli", "train", "--script", job[0], *flags]
        if self.nodes == 1:
            return [[*train, "--run-dir", str(directory / "run"), "--", *job[1:]]]
        meet = ["--num-nodes", str(self.nodes), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [
            [*train, *meet, "--node-rank", str(node), "--run-dir", str(directory / f"run-{node}" if node else directory / "run"), "--", *job[1:]]
            for node in range(self.nodes)
        ]  # fmt: skip


STARTS = {
    start.name: start
    for start in (
        Start("single", "single", processes=1),
        Start("pytorch-ddp", "pytorch-ddp"),
        Start("fsdp", "fsdp"),
        Start("deepspeed", "deepspeed"),
        Start("horovod", "horovod"),
        Start("ray", "ray"),
        Start("tensorflow", "tensorflow", "keras"),
        Start("fit() of a script", "pytorch-ddp", is_fit=True),
        *(
            Start(f"{backend}, 2 nodes", backend, "keras" if backend == "tensorflow" else "torch", nodes=2)
            for backend in ("pytorch-ddp", "fsdp", "deepspeed", "horovod", "tensorflow")
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Listener:
    """A socket that a run listens on."""

    service: str  # a key of SERVICES, or a description of a process that was not expected to listen
    process: str
    address: str  # "*" for all interfaces; the path of a unix socket
    port: int | None = None  # None for a unix socket
    pid: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether other machines can reach it."""
        return self.port is not None and not _is_loopback(self.address)


class Run:
    """A context manager that starts a run, which pauses in the middle of its training. The run is killed at the end."""

    def __init__(self, start: Start, directory: Path, environ: Mapping[str, str] | None = None) -> None:
        self.start, self.directory, self.mark = start, directory, uuid.uuid4().hex
        self._environ = {**(os.environ if environ is None else environ), MARK: self.mark, "OMP_NUM_THREADS": "1"}
        self._outputs: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Run:
        for number, command in enumerate(self.start.commands(self.directory)):
            self._outputs.append(self.directory / f"output-{number}")
            with self._outputs[-1].open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=self.directory, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                        start_new_session=True,
                    )
                )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    @property
    def output(self) -> str:
        """Return everything that the run has printed."""
        return "".join(path.read_text(errors="replace") for path in self._outputs)

    def pids(self) -> list[int]:
        """Return the processes of the run, also detached ones: they, or a parent, have the mark of this run in their environment."""
        wanted, found, parents = f"{MARK}={self.mark}".encode(), set(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                parents[int(entry.name)] = _parent(int(entry.name))
                with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.add(int(entry.name))
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more  # processes that overwrite their environment with a title
        return sorted(found)

    def wait(self) -> list[dict[str, object]]:
        """Wait until all ranks have paused in their training. Return what each rank reports about itself."""
        files = [self.directory / f"at-{rank}.json" for rank in range(self.start.processes)]
        deadline = time.monotonic() + START_S
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"{self.start.name} did not reach its training\n{self.output[-3000:]}")
            time.sleep(0.05)
        return [json.loads(file.read_text()) for file in files]

    def go_on(self) -> None:
        """Let the run continue its training."""
        (self.directory / "go").touch()

    def end(self, limit_s: float) -> int:
        """Wait for the end of the run and return its exit code, of several nodes the highest. Raises TimeoutExpired."""
        deadline = time.monotonic() + limit_s
        return max(abs(process.wait(max(0.1, deadline - time.monotonic()))) for process in self.processes)

    def listeners(self) -> list[Listener]:
        """Return the sockets that the run listens on while its ranks are paused."""
        ranks = self.wait()
        sockets = {**_tcp_listeners(), **_unix_listeners()}
        found: dict[str, list[int]] = {}
        for pid in self.pids():
            for inode in _sockets_of(pid) & sockets.keys():
                found.setdefault(inode, []).append(pid)
        listeners = []
        for inode, pids in found.items():
            address, port = sockets[inode]
            process, service = self._known(pids[0], port, ranks)  # the one that opened it is older than its children
            listeners.append(Listener(service, process, address, port, pids[0]))
        return sorted(listeners, key=lambda each: (each.process, each.service, each.address, each.port or 0))

    def _known(self, pid: int, port: int | None, ranks: Sequence[Mapping[str, object]]) -> tuple[str, str]:
        """Return names for the process and for the service that listens on `port`."""
        words = _command(pid)
        named = {number: name for rank in ranks for name, number in dict(rank["ports"]).items()}  # type: ignore[call-overload]
        rank = next((each["rank"] for each in ranks if each["pid"] == pid), None)
        if rank is not None:
            return f"rank {rank}", named.get(port, "gloo")
        if words[0].startswith("ray::"):
            return "Ray's workers", "Ray's HTTP" if "Agent" in words[0] else "Ray's gRPC"
        if (name := Path(words[0]).name) in ("gcs_server", "raylet"):
            return name, "Ray's gRPC"
        if pid in [process.pid for process in self.processes] or words != _command(_parent(pid)):
            return "launcher", named.get(port, "launcher")
        if self.start.backend == "ray":
            return "Ray's driver", "Ray's gRPC"
        return "agent", named.get(port, "a service of the agent" if self.start.nodes == 1 else "the nodes' server")


# ------------------------------------------------------------------ /proc


def _tcp_listeners() -> dict[str, tuple[str, int | None]]:
    """Return the address and port of every TCP socket of this machine that listens, by inode."""
    found: dict[str, tuple[str, int | None]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):  # a machine without IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    host, _, port = fields[1].partition(":")
                    found[fields[9]] = (_address(host, family), int(port, 16))
    return found


def _address(digits: str, family: int) -> str:
    """Return the address that /proc/net writes as `digits`: words in the byte order of the machine."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    text = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
    return "*" if text in ("0.0.0.0", "::") else text


def _unix_listeners() -> dict[str, tuple[str, int | None]]:
    """Return the path of every unix socket that listens, by inode. The path of an abstract socket begins with @."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {fields[6]: (fields[7], None) for fields in lines if len(fields) > 7 and int(fields[3], 16) & 1 << 16}


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
                    found.add(match[1])
    return found


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def can_enter(path: str) -> bool:
    """Return whether every user of this machine can connect to the unix socket at `path`."""
    if path.startswith("@"):
        return True
    return all(parent.stat().st_mode & 0o001 for parent in Path(path).parents) and bool(
        Path(path).stat().st_mode & 0o002
    )


def free_port() -> int:
    """Return a port that is free, of those that Linux gives to no connection by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


# ------------------------------------------------------------------ the table


def rows(start: Start, listeners: Sequence[Listener]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table for one start. Equal listeners share a row with their number."""
    counted = Counter(
        dataclasses.replace(each, port=each.port and 1, pid=0) for each in listeners if each.port is not None
    )
    if not counted:
        yield start.name, "", "nothing", "", "", ""
    for each, number in counted.items():
        service = SERVICES.get(each.service)
        many = f" ({number})" if number > 1 else ""
        yield (
            start.name, each.process, f"{each.service}{many}", reachable(each, start.nodes), service.whose if service else "",
            service.can if service else "**not expected: shut it**",
        )  # fmt: skip


def reachable(listener: Listener, nodes: int = 1) -> str:
    """Return who can connect to a listener.

    Runs on several nodes are measured on loopback; a real run listens on the network between the nodes.
    """
    if nodes > 1 and _is_loopback(listener.address):
        return "whoever reaches the port over the network"
    if listener.address == "*":
        return "every machine that reaches this one"
    return "users of this machine" if _is_loopback(listener.address) else f"machines that reach {listener.address}"


HEADS = ("run", "process", "what listens", "who reaches it", "whose", "what a stranger can do there")


def table(found: Sequence[tuple[str, ...]]) -> str:
    """Return the rows `found` as a Markdown table."""
    lines = [HEADS, tuple("---" for _ in HEADS), *found]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measure(start: Start) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of one start and its unix sockets to which every user can connect."""
    with tempfile.TemporaryDirectory() as directory, Run(start, Path(directory)) as run:
        listeners = run.listeners()
        open_sockets = [each.address for each in listeners if each.port is None and can_enter(each.address)]
        return list(rows(start, listeners)), open_sockets


def main(argv: Sequence[str]) -> int:
    """Measure the starts that are named in `argv`, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="*", metavar="START", help=f"one of: {', '.join(STARTS)}")
    parser.add_argument("--write", action="store_true", help="write the table into docs/security.md")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.starts if name not in STARTS]:
        parser.error(f"no such start: {', '.join(unknown)}")
    if asked.write and asked.starts:
        parser.error("--write writes the whole table: drop the names of starts")
    found: list[tuple[str, ...]] = []
    for name in asked.starts or STARTS:
        sys.stderr.write(f"{name}\n")
        new, open_sockets = measure(STARTS[name])
        found += new + [(name, "", f"unix socket {path}", "users of this machine", "", "") for path in open_sockets]
    text = table(found)
    sys.stdout.write(text)
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
