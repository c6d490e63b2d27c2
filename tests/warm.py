"""Processes that have imported torch, and one of TensorFlow and DeepSpeed too, and fork commands: those start two to five CPU
seconds earlier, and take up to two CPU seconds less at their end.

Each test process starts one of each kind at its first use, see `server`. A command that could notice the difference is not run in
it, see `kind_for`: imports read environment variables, and a test that limits CPU time measures the imports too. Python clears no
module when a forked command ends. A test of what can go wrong there starts its command with `fresh=True`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.machinery
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What a Python process or an import of torch reads once.
_READ_AT_START = (
    "PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "KINETO", "GLOG", "CUDA", "GLOO", "NCCL", "TF_",
)  # fmt: skip
_MODULES = (
    "torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch.distributed.fsdp",
    "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "sklearn.datasets", "torchmetrics",
)  # fmt: skip
# Backend of a command -> what its library reads too, and what it reads later only.
_SLOW = {"tensorflow": (("KERAS",), {"TF_CONFIG"}), "deepspeed": (("DS_",), set())}
# How `Machines.on` begins a command: in the namespaces of a process, in a directory.
_ON_MACHINE = ["nsenter", "--target", "PID", "--net", "--mount", "--uts", "--wd=DIR"]
PARENT = "PARENT"  # argument that stands for the process id of a command's parent
_MESSAGE_BYTES = 1 << 20


def kind_for(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the kind of server that can run a command: `python -m distributed.cli train`, `python -m distributed.launcher` or
    `python SCRIPT`, also on a machine of `Machines`. None if none can."""
    mine, argv = _environ(), _split(argv)[1]
    is_script = argv[0] == sys.executable and len(argv) > 1 and argv[1].endswith(".py")
    is_train = list(argv[:4]) == [sys.executable, "-m", "distributed.cli", "train"]
    is_launcher = list(argv[:3]) == [sys.executable, "-m", "distributed.launcher"]
    if (
        not (is_script or is_train or is_launcher)
        or env.get("OMP_NUM_THREADS", "1") != "1"
        or "profile" in " ".join(argv)
    ):
        return None
    slow = [name for name in _SLOW if is_train and f"--backend {name}" in " ".join(argv)]
    read, later = _SLOW[slow[0]] if slow else ((), set())
    differ = {
        name for name in {*env, *mine} if name.startswith((*_READ_AT_START, *read)) and env.get(name) != mine.get(name)
    }
    return None if differ - {"OMP_NUM_THREADS"} - later else [*slow, "torch"][0]


def _split(argv: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Return the machine of a command, its process "enter" and its directory "cwd" (empty for no machine), and the command there."""
    size = len(_ON_MACHINE)
    if len(argv) <= size or [*argv[:2], "PID", *argv[3:6], argv[6][:5] + "DIR"] != _ON_MACHINE:
        return {}, argv
    return {"enter": argv[2], "cwd": argv[6].removeprefix("--wd=")}, argv[size:]


def _environ() -> dict[str, str]:
    from tests.conftest import clean_environment

    return clean_environment(OMP_NUM_THREADS="1")


class Command:
    """A command that was forked, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self.cpu_s = 0.0  # of the command and of the processes that it waited for, once it has ended
        self._server = server

    def poll(self) -> int | None:
        self._server.read(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("forked command", timeout or 0)
            self._server.read(left)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, seen from the test process."""

    def __init__(self, mark: str, kind: str) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), mark, kind], pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, env={**_environ(), mark: "0" * 32}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        self._commands: dict[int, Command] = {}
        self._forked: list[int] = []
        atexit.register(self.end)

    def spawn(self, argv: Sequence[str], cwd: Path | None, env: Mapping[str, str], out: Path, err: Path) -> Command:
        """Start a command with its output in two files."""
        machine, argv = _split(argv)
        request = {
            "argv": [str(self._process.pid) if word == PARENT else word for word in argv],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env),
            "out": str(out),
            "err": str(err),
            **machine,
        }
        self._channel.sendall(json.dumps(request).encode())
        while not self._forked:
            self.read(60)
        return self._commands[self._forked.pop()]

    def read(self, timeout: float | None) -> None:
        """Take in what the process says, for `timeout` seconds at most."""
        self._channel.settimeout(timeout)
        with contextlib.suppress(BlockingIOError, TimeoutError):
            data = self._channel.recv(_MESSAGE_BYTES)
            if not data:
                raise RuntimeError("the process that forks commands has ended")
            said = json.loads(data)
            if "code" not in said:
                self._commands[said["pid"]] = Command(self, said["pid"])
                self._forked.append(said["pid"])
            else:
                command = self._commands.pop(said["pid"])
                command.cpu_s, command.returncode = said["cpu_s"], said["code"]

    def end(self) -> None:
        """Let the process end."""
        self._channel.close()
        self._process.wait()


@functools.cache
def server(mark: str, kind: str) -> Server:
    """Return this test process's server of `kind`, "torch" or a key of `_SLOW`.

    `mark` names the environment variable that marks a command and its descendants.
    """
    return Server(mark, kind)


# ------------------------------------------------------------------ in the process that forks


def _import(kind: str) -> None:
    """Import what commands of this kind need."""
    for name in _MODULES if kind != "tensorflow" else ["torch"]:
        with contextlib.suppress(ModuleNotFoundError):  # the command says what is missing
            importlib.import_module(name)
    if kind != "torch":
        from distributed.config.registry import REGISTRY
        from distributed.launching.request import LaunchRequest

        entry = REGISTRY[kind]
        pkgutil.resolve_name(entry.warm_up)(LaunchRequest("run", device="cpu", environ=entry.environ))


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return the request in that process, and None at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status, used = os.wait4(key.data, 0)
                    code = os.waitstatus_to_exitcode(status)
                    _say(channel, {"pid": key.data, "code": code, "cpu_s": used.ru_utime + used.ru_stime})
                    continue
                data = channel.recv(_MESSAGE_BYTES)
                if not data:
                    return None
                is_ready, ready = os.pipe()
                pid = os.fork()
                if pid == 0:
                    for fd in [is_ready, *(each.fd for each in selector.get_map().values())]:
                        os.close(fd)
                    channel.detach()
                    return {**json.loads(data), "ready": ready}
                os.close(ready)
                os.read(is_ready, 1)  # until the process has its mark
                os.close(is_ready)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _say(channel, {"pid": pid})


def _say(channel: socket.socket, what: Any) -> None:
    with contextlib.suppress(OSError):  # the test process has ended
        channel.sendall(json.dumps(what).encode())


def _become(request: dict[str, Any], mark: str) -> None:
    """Make this forked process one that was started with the request's environment, directory and files."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.getenv.restype = ctypes.c_void_p
    # /proc/PID/environ shows the memory that the process was started with; os.environ is apart from it.
    ctypes.memmove(libc.getenv(mark.encode()), request["env"][mark].encode(), 32)
    os.environ.clear()
    os.environ.update(request["env"])
    if "enter" in request:
        spaces = [os.open(f"/proc/{request['enter']}/ns/{name}", os.O_RDONLY) for name in ("net", "mnt", "uts")]
        for fd in spaces:
            if libc.setns(fd, 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.close(fd)
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # TMPDIR may be another
    for fd, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY),
        (2, request["err"], os.O_WRONLY),
    ):
        opened = os.open(name, flags | (os.O_APPEND if fd else 0))
        os.dup2(opened, fd)
        os.close(opened)
    os.close(request["ready"])


def _run(argv: list[str]) -> None:
    """Run what follows `python` in a command line."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], str(Path.cwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    script = str(Path.cwd() / argv[0])
    sys.argv, sys.path[0] = argv, str(Path(script).parent)
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__ = script, loader
    sys.modules["__main__"] = main
    loader.exec_module(main)


def _outcome(argv: list[str]) -> int:
    """Run what follows `python` in a command line, and return its exit code. An error is shown as Python shows it."""
    try:
        _run(argv)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Python ends the process by SIGINT
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    _import(sys.argv[3])
    gc.collect()
    gc.freeze()  # a collection would copy the memory of what is imported
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        _become(_request, sys.argv[2])
        from distributed.runs.processes import finish

        code = _outcome(_request["argv"][1:])
        finish()
        os._exit(code & 0xFF)  # Python would copy the memory of all modules to clear them: two CPU seconds
