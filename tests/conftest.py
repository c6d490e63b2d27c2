"""Fixtures for every test: commands run in a clean environment, under a time limit, and leave no process behind.

run_cli(args, timeout=120, cwd=None, env=None)     run `python -m distributed.cli ARGS` and return a Finished
run_python(args, timeout=120, cwd=None, env=None)  run `python ARGS` in the same way
run_cli_once(...)                                  run_cli for fixtures of a whole module
start(argv, cwd=None, env=None)                    a Started: .wait_for(text), .signal(n), .finish(timeout), .alive()

A command is forked from a process that has imported torch where that makes no difference (tests/warm.py). `fresh=True` starts it
from nothing.

Each fixture fails the test when the time is up, after killing all processes, and when a finished command leaves a
process behind. Descendants are found by an environment variable, even if they made a session of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.config.registry import backend_entry, missing_libraries
from distributed.runs.processes import stat_of
from tests import warm

ROOT = Path(__file__).resolve().parent.parent
# The limit of a command that is run to its end only ends what hangs, and leaves room for a machine that does other work too.
# Limits of `Started.finish` and `wait_for` may be promises, and are exact.
PATIENCE = 2.5
MARK = "DISTRIBUTED_TEST_COMMAND"
# Variables of launchers and clusters. A test that ran under one would see workers that are not its own.
_FOREIGN = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_|ROLE_|NODE_RANK|MASTER_|TORCHELASTIC_|SLURM_|PET_|JOB_COMPLETION_INDEX$|TF_CONFIG$|KERAS_BACKEND$|OMPI_|PMI"
    r"|DISTRIBUTED_|MLFLOW_|COLUMNS$|LINES$|FORCE_COLOR|NO_COLOR|PYTEST_|TORCHINDUCTOR_)"
)


def pytest_configure() -> None:
    """Restore the default signal handlers. A suite under nohup or in the background of a shell ignores these
    signals, and commands would inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Keep test files whose assertions pytest has rewritten, also with PYTHONDONTWRITEBYTECODE. Otherwise each test process rewrites
    # them again.
    sys.dont_write_bytecode = False


# Files that take twenty seconds or more, the longest first. `make test` distributes whole files in this order, so that no
# process has to run a long file alone at the end.
LONGEST = (
    "test_pages", "test_every_backend", "test_tensorflow", "test_soak", "test_ray", "test_fit_from_script", "test_tuner", "test_many_nodes",
    "test_horovod", "test_learning_pages", "test_object_storage", "test_parity", "test_deepspeed", "test_seeds", "test_launch",
    "test_mlflow", "test_readme", "test_doors", "test_submit_slurm", "test_ray_cluster", "test_options", "test_failures", "test_signals",
    "test_resume", "test_foreign_launchers", "test_examples", "test_elastic", "test_tune", "test_keras", "test_node_server", "test_own_loop",
    "test_tensorboard", "test_communication", "test_fsdp", "test_notebook", "test_init", "test_whole_model", "test_comm_hooks",
    "test_several_models", "test_settings_of_a_run", "test_notebooks", "test_deepspeed_files", "test_losses", "test_libraries", "test_hugging_face",
    "test_exporting", "test_shipped_callbacks", "test_hangs", "test_rate_finder", "test_size_finder", "test_benchmarks", "test_compile_cache",
    "test_report_in_browser", "test_pods", "test_site", "test_resume_buckets", "test_fuzzed_files", "test_hostile_files",
)  # fmt: skip


ALONE = ("docs", "conformance", "cluster")  # marks of tests that a command of their own runs


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file without tests of a mark that `-m` names, because each test process takes a minute to import all files."""
    mark = "|".join(ALONE)
    wanted = re.fullmatch(rf"\(?((?:{mark})(?: or (?:{mark}))*)\)?(?: and not \w+)*", config.option.markexpr)
    if wanted is None or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text()
    return not any(f"pytest.mark.{name}" in text for name in wanted[1].split(" or ")) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first.

    Workaround (xdist 3.8, pytest-dev/pytest-xdist#1386; may go when xdist writes the group into the ids of pytest 9.2): xdist looks for
    the group of a test at the end of its id, does not find it, and distributes the tests of a group to all processes.
    """
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ALONE and f"pytest.mark.{mark.name}" not in _text(item.path):
                raise pytest.UsageError(
                    f"{item.path}: write pytest.mark.{mark.name}, by which `-m {mark.name}` finds the file"
                )
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    if not getattr(config.option, "loadgroup", False) or not items or not hasattr(items[0], "_id"):
        return
    from _pytest.nodeid import NodeId

    for item in items:
        if (group := item.get_closest_marker("xdist_group")) is not None:
            item._id = NodeId.parse(f"{item.nodeid}@{group.args[0]}")  # type: ignore[attr-defined]


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def pytest_collection_finish() -> None:
    """Make fits in the test processes cheap.

    Exclude imported libraries from garbage collection, because each fit ends with a collection, which otherwise takes a fifth of
    a second. Let torch compute in one thread.
    """
    gc.collect()
    gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # four processes test at once, and threads of tiny tensors would wait for each other


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    cpu_s: float  # CPU time of the command and of the processes it waited for
    is_forked: bool = False  # from a process that had imported torch, see tests/warm.py

    def within(self, limit_s: float) -> bool:
        """Return True if it took less than `limit_s` of CPU time, which other load hardly changes, and did not wait
        for long."""
        assert not self.is_forked, "this command was spared an import: run it with fresh=True"
        return self.cpu_s < limit_s and self.seconds < 10 * limit_s

    @property
    def output(self) -> str:
        """Both streams, for a message."""
        ending = f"exit {self.returncode} after {self.seconds:.1f} s, {self.cpu_s:.1f} s of CPU time"
        return f"{ending}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Started:
    """A running command. Its output goes to files, so that nothing blocks on a full pipe."""

    def __init__(
        self, argv: Sequence[str], directory: Path, cwd: Path | None, env: dict[str, str], fresh: bool = False
    ) -> None:
        """Start `argv`. Unless `fresh`, a process that has imported torch is forked if that makes no other difference."""
        self.mark = uuid.uuid4().hex
        self._files = [directory / f"{self.mark}.{name}" for name in ("out", "err")]
        self._began, self._cpu_began_s = time.monotonic(), _children_cpu_s()
        kind = None if fresh else warm.kind_for(argv, env)
        self.is_forked = kind is not None
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            if kind is not None:
                self.process: Any = warm.server(MARK, kind).spawn(argv, cwd, {**env, MARK: self.mark}, *self._files)
                return
            self.process = subprocess.Popen(
                [str(os.getpid()) if word == warm.PARENT else word for word in argv], cwd=cwd, env={**env, MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """Everything written so far, stdout first."""
        return "".join(file.read_text(errors="replace") for file in self._files)

    def alive(self) -> list[int]:
        """Return the process ids of the command and its descendants that are running."""
        return marked(self.mark)

    def wait_for(self, what: str | Callable[[], Any], timeout: float = 120) -> Any:
        """Wait until the output contains `what`, or `what()` is true. Fail the test when the command ends or time is
        up."""

        def seen() -> Any:
            return what in self.output if isinstance(what, str) else what()

        return poll(
            seen,
            timeout,
            lambda: f"{what!r} did not come\n{self.output}",
            lambda: self.process.poll() is not None,
        )

    def signal(self, number: int) -> None:
        """Send `number` to the command's first process only."""
        self.process.send_signal(number)

    def finish(self, timeout: float = 120, grace: float = 5) -> Finished:
        """Wait for the end, at most `timeout` seconds. All descendants must be gone within `grace` seconds after it."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            where = stacks(self.alive())
            self.kill()
            pytest.fail(f"not done after {timeout} s:\n{self.output}\n{where}")
        seconds = time.monotonic() - self._began
        cpu_s = self.process.cpu_s if self.is_forked else _children_cpu_s() - self._cpu_began_s
        out, err = (file.read_text(errors="replace") for file in self._files)
        try:
            poll(lambda: not self.alive(), grace, lambda: f"left processes {describe(self.alive())}\n{out}\n{err}")
        finally:
            self.kill()
        return Finished(code, out, err, seconds, cpu_s, self.is_forked)

    def kill(self) -> None:
        """Kill all remaining processes."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def patient(limit_s: float) -> float:
    """Return the time limit of a command that is run to its end, or of a job of a cluster, in the place of `limit_s`."""
    return limit_s * PATIENCE if limit_s >= 60 else limit_s


def _children_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one and its children have waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def marked(mark: str, variable: str = MARK) -> list[int]:
    """Return running processes (no zombies) whose `variable` has the value `mark`, in the order in which they began."""
    wanted = f"{variable}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                stat = stat_of(int(entry.name))
                if stat is not None:
                    found.append((int(stat.started), int(entry.name)))  # process ids start anew at pid_max
        except OSError:  # the process has ended, or belongs to another user
            continue
    return [pid for _, pid in sorted(found)]


def describe(pids: Sequence[int]) -> str:
    """Return process ids with their command lines."""
    lines = []
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            command = "(gone)"
        lines.append(f"{pid}: {command}")
    return "; ".join(lines)


def stacks(pids: Sequence[int]) -> str:
    """Return the stacks of these Python processes from py-spy, or its error message."""
    found = []
    for pid in pids:
        command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no stacks: {error}"
        found.append(done.stdout + done.stderr)
    return "\n".join(found)


def needs_backend(name: str) -> None:
    """Skip the test if a library of backend `name` is missing. Fail it instead if REQUIRE_BACKENDS names that
    backend."""
    if missing := missing_libraries(backend_entry(name)):
        _skip_or_fail(name, f"backend {name} needs {', '.join(missing)}, which is not installed here")


def needs_library(library: str, backend: str) -> None:
    """Skip a test of `backend` if `library` of the test extra is missing. Fail it instead if REQUIRE_BACKENDS names
    the backend."""
    if importlib.util.find_spec(library) is None:
        _skip_or_fail(backend, f"this test of backend {backend} needs {library}, which is not installed here")


def _skip_or_fail(backend: str, reason: str) -> None:
    if backend in re.split(r"[,\s]+", os.environ.get("REQUIRE_BACKENDS", "")):
        pytest.fail(f"{reason}, and REQUIRE_BACKENDS names it")
    pytest.skip(reason)


def poll(
    condition: Callable[[], Any],
    timeout: float,
    message: Callable[[], str],
    ended: Callable[[], bool] = lambda: False,
) -> Any:
    """Return the first true value of `condition()`. Fail the test after `timeout` seconds, or if `ended()` is true
    before.

    A condition that takes long, such as one that starts a program, is checked less often, so that the looks leave the
    cores to what is waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        last_look = ended() or began > deadline
        if value := condition():
            return value
        if last_look:
            pytest.fail(message())
        time.sleep(min(max(0.03, 12 * (time.monotonic() - began)), 0.25))


def free_port() -> int:
    """Return a port on which nobody listens, of those that the kernel gives to no connection by itself.

    A port that was bound as port 0 may belong to the connection of another test before it is listened on.
    """
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 20_000 + secrets.randbelow(least - 20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment of this process without variables of launchers, clusters and terminals. This checkout
    is first on the path."""
    env = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    env["PYTHONPATH"] = str(ROOT)
    return {**env, **extra}


@pytest.fixture(autouse=True)
def _no_foreign_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if _FOREIGN.match(name) and not name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Started]]:
    """Start a command (see the top of this file). What the test leaves running is killed at its end."""
    directory = tmp_path_factory.mktemp("commands")
    running: list[Started] = []

    def begin(
        argv: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None, fresh: bool = False
    ) -> Started:
        running.append(Started(list(map(str, argv)), directory, cwd, clean_environment(**(env or {})), fresh))
        return running[-1]

    yield begin
    for command in running:
        command.kill()


@pytest.fixture
def run_python(start: Callable[..., Started]) -> Callable[..., Finished]:
    """Run `python ARGS` until it ends (see the top of this file)."""

    def run(args: Sequence[str], timeout: float = 120, fresh: bool = False, **where: Any) -> Finished:
        return start([sys.executable, *args], fresh=fresh, **where).finish(patient(timeout))

    return run


@pytest.fixture
def run_cli(start: Callable[..., Started]) -> Callable[..., Finished]:
    """Run `python -m distributed.cli ARGS` until it ends (see the top of this file)."""

    def run(args: Sequence[str], timeout: float = 120, fresh: bool = False, **where: Any) -> Finished:
        return start([sys.executable, "-m", "distributed.cli", *args], fresh=fresh, **where).finish(patient(timeout))

    return run


@pytest.fixture(scope="module")
def run_cli_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """Return `run_cli` for a module's own fixtures, so that workers are started once for a group of checks."""
    directory = tmp_path_factory.mktemp("commands")

    def run(
        args: Sequence[str],
        timeout: float = 120,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> Finished:
        argv = [sys.executable, "-m", "distributed.cli", *map(str, args)]
        command = Started(argv, directory, cwd, clean_environment(**(env or {})), fresh)
        try:
            return command.finish(patient(timeout))
        finally:
            command.kill()

    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium, see scripts/browser.py."""
    spec = importlib.util.spec_from_file_location("browser", ROOT / "scripts" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.find_chromium() is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail("REQUIRE_CHROMIUM is set, and there is no chromium")
        pytest.skip("no chromium is installed here")
    with module.Browser() as chromium:
        yield chromium


@pytest.fixture
def make_machines(tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """Return a function that makes a number of machines. They end with the test."""
    from tests.machines import Machines

    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        reason = "only root can make network namespaces, with ip, unshare and nsenter"
        if os.environ.get("REQUIRE_MACHINES"):
            pytest.fail(f"REQUIRE_MACHINES is set, and {reason}")
        pytest.skip(reason)
    made: list[Any] = []

    def make(count: int, **options: Any) -> Any:
        made.append(Machines(tmp_path, count, **options))
        return made[-1]

    yield make
    for machines in made:
        machines.close()
