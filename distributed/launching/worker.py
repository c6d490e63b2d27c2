"""Run a script or a job in a worker as `python SCRIPT ARGS` would, and report how it ended."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import pickle
import pkgutil
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from distributed.config.merging import Overrides
from distributed.errors import TrainingInterrupted
from distributed.launching.causes import location_of, location_of_caller
from distributed.launching.engines import has_joined, seed_generators, use_store
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.heartbeat import phase_of
from distributed.launching.reporter import failure_event
from distributed.launching.request import (
    Handover,
    LaunchRequest,
    has_trainer,
    link,
    loading,
    set_forked_worker,
    set_this_worker,
    unused_settings,
)
from distributed.launching.sharing import ways_out
from distributed.launching.variables import set_missing
from distributed.loggers.registry import environ_of_run
from distributed.runs.processes import REGROUP_SIGNAL, finish, flush, keep_interrupts, name_process
from distributed.runs.shared_memory import mark_process
from distributed.state import OnEvent

_LONGEST_DIRECTORY = 80  # bytes, such that the path of a socket below it has at most 107 (unix(7))


def run_worker(request: LaunchRequest, command: dict[str, Any], fds: list[int]) -> int:
    """Run a forked worker.

    `command` has the worker's environment, and `fds` are its standard output, standard error and control pipe.
    """
    _take_streams(fds)
    keep_interrupts()
    if request.is_elastic:
        signal.signal(REGROUP_SIGNAL, signal.SIG_IGN)
    os.environ.update(command["environ"])
    set_missing(request.environ)
    set_missing(environ_of_run(Path(request.run_dir)))
    use_store(command.get("store"))
    _keep_sockets_in(command["temporary"])
    mark_process(command["temporary"])
    set_forked_worker(request, command["restart_count"], fds[2])
    _seed(request.overrides)
    rank = int(command["environ"]["RANK"])
    name_process(f"rank {rank}")

    def on_event(event: Mapping[str, Any]) -> None:
        channel = link()
        if channel is not None:
            channel.send({**event, "rank": rank})

    with _before_hard_exit(lambda: _report_unshared(on_event), on_event):
        code = _run(request, on_event)
    if code == 0 and rank == 0:
        _report_unused(request, on_event)
    if code == 0:
        _report_unshared(on_event)
    # Workaround (torch 2.13, pytorch/pytorch#179291; may go when torch ends gloo's threads before the interpreter): C++ destructors
    # are left out, because those of torch can abort.
    finish()
    return code


def run_here(handover: Handover, request: LaunchRequest, environment: WorkerEnvironment) -> int:
    """Run the script of `request` in this process, which another launcher started as a worker. Return its exit code."""
    os.environ.update({name: value for name, value in environment.to_environ().items() if not os.environ.get(name)})
    set_this_worker(handover)
    use_store(None)  # before the seed, which reaches only generators that are loaded
    _seed(request.overrides)

    def on_event(event: Mapping[str, Any]) -> None:
        if event["kind"] == "warning":
            sys.stderr.write(f"warning: {event['text']}\n")
        if event["kind"] != "error":
            return
        _write_error_file(event)
        if event["is_echo"]:
            return
        text = f"error: {event['message']}" if event["is_message_enough"] else event["traceback"]
        sys.stderr.write(text + "\n")

    code = _run(request, on_event, environment)
    if code == 0 and environment.rank == 0:
        _report_unused(request, on_event)
        if environment.world_size > 1 and not _is_shared():
            on_event({"kind": "warning", "text": ways_out(request.script, environment.world_size)})
    return code


def _keep_sockets_in(directory: str) -> None:
    """Let `multiprocessing` keep its sockets, such as those of loader processes, in a directory that the launcher removes.

    Workaround (Python 3.11, no upstream issue known; may go when `multiprocessing` has a setting for it): its own temporary
    directory stays behind if a worker is killed.
    """
    import multiprocessing

    if len(os.fsencode(directory)) < _LONGEST_DIRECTORY:
        multiprocessing.current_process()._config.setdefault("tempdir", directory)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _before_hard_exit(act: Callable[[], None], on_event: OnEvent) -> Iterator[None]:
    """Report where the script calls `os._exit`, because this call skips all cleanup. Call `act` before `os._exit(0)`."""
    leave, worker = os._exit, os.getpid()

    def report_and_exit(status: int) -> NoReturn:
        if os.getpid() == worker:  # not in a process that the script has forked
            on_event({"kind": "leaves", "location": location_of_caller(sys._getframe(1))})
            if status == 0:
                act()
        leave(status)

    os._exit = report_and_exit
    try:
        yield
    finally:
        os._exit = leave


def _report_unshared(on_event: OnEvent) -> None:
    if not _is_shared():
        on_event({"kind": "unshared"})


def _is_shared() -> bool:
    """Return whether the script made the processes share work, for instance by a Trainer or a process group."""
    return has_trainer() or has_joined()


def _report_unused(request: LaunchRequest, on_event: OnEvent) -> None:
    if names := unused_settings():
        flush()
        on_event({"kind": "warning", "text": f"{request.script} made no Trainer, so {', '.join(names)} had no effect"})


def _run(request: LaunchRequest, on_event: OnEvent, found: WorkerEnvironment | None = None) -> int:
    """Run the script or the payload of the request. Report a failure, and return the exit code."""
    try:
        if request.working_dir is not None:
            os.chdir(request.working_dir)
        _before_script(request, found or worker_environment(), on_event)
        if request.payload is not None:
            _run_payload(request)
        else:
            assert request.script is not None
            _run_script(request.script, request.script_args)
    except TrainingInterrupted as end:
        on_event({"kind": "interrupted", "signum": end.signum})
        return 128 + end.signum
    except SystemExit as end:
        on_event({"kind": "leaves", "location": location_of(end), "phase": phase_of(end).in_fit})
        return _exit_code(end)
    except KeyboardInterrupt:
        on_event({"kind": "interrupted", "signum": int(signal.SIGINT)})
        return 128 + signal.SIGINT
    except BaseException as error:  # the top frame of a worker: report it to the launcher, whatever it is
        return _failed(error, on_event)
    return 0


def _before_script(request: LaunchRequest, found: WorkerEnvironment | None, on_event: OnEvent) -> None:
    """Call the backend's function `before_script`, if it has one, before the user's script can use the engine."""
    if request.before_script and found is not None:
        pkgutil.resolve_name(request.before_script)(request, found, on_event)


def _failed(error: BaseException, on_event: OnEvent) -> int:
    """Report `error` with its tracebacks, and return the exit code of the worker."""
    flush()
    event = failure_event(error)
    on_event(event)
    return int(event["exit_code"])


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _run_script(script: str, arguments: tuple[str, ...]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` does.

    The script's module stays in `sys.modules`, for pickling and for threads that are still running.
    """
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    script = str(Path.cwd() / script)  # __file__ of a main module is absolute; sys.argv[0] is as on the command line
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __loader__=loader, __spec__=None, __cached__=None, __annotations__={})
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(script), script), main.__dict__)


def _run_payload(request: LaunchRequest) -> None:
    """Call the pickled job in a fresh, empty __main__, with the caller's search path."""
    assert request.payload is not None
    if request.sys_path is not None:
        sys.path[:] = request.sys_path
    sys.argv[:] = [request.script or "", *request.script_args]
    sys.modules["__main__"] = types.ModuleType("__main__")
    with open(request.payload, "rb") as file, loading():
        job = pickle.load(file)
    job()


def _take_streams(fds: list[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(source, target)
    for fd in (null, *fds[:2]):
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # Python does not line-buffer a pipe, and a person may be watching
            stream.reconfigure(line_buffering=True)


def _seed(overrides: Overrides) -> None:
    seed_generators(int(overrides.value("seed", 0)))


def _write_error_file(event: Mapping[str, Any]) -> None:
    """Write the error to the file that torchrun reads (TORCHELASTIC_ERROR_FILE), if the launcher named one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    detail = {"py_callstack": event["full_traceback"], "timestamp": str(int(event["time"]))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{event['type']}: {event['message']}", "extraInfo": detail}}, file)
