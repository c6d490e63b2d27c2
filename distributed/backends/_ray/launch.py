"""Launcher over Ray: Ray Train places the workers and restarts them; this launcher judges and shows what happened.

Ray runs in a process of its own. In the launcher's process the rendezvous server and the workers' output have a thread each, and the
main thread judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import secrets
import socket
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed.backends._ray.cluster import Cluster
from distributed.backends._ray.rendezvous import RendezvousServer, WorkerConnections, attach
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.epochs import Epochs, Row, write_row
from distributed.launching.listening import loopback_environ, reachable_address
from distributed.launching.output import WorkerOutput, display_of
from distributed.launching.request import LaunchRequest
from distributed.launching.script import check_script
from distributed.launching.secret import VARIABLE
from distributed.launching.stopping import Signals, Stop
from distributed.launching.subreaper import Report, Subreaper
from distributed.launching.variables import THREAD_VARIABLES, set_thread_variables
from distributed.launching.verdicts import Verdict, Verdicts
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import close_results

_RAY_ENDS_S = 30.0  # time for Ray's orderly end when the work is done; then it is killed


def serve(request: LaunchRequest) -> int:
    """Run the job of `request` in workers that Ray places, and return the exit code. Raises DistributedError before
    the first worker starts."""
    if request.script is not None and request.payload is None:
        check_script(request.script)
    cluster = Cluster(request)
    run = RunDirectory(request.run_dir)
    run.check(resume=request.resume)
    run.lock()
    run.logs.mkdir(parents=True, exist_ok=True)
    threads = _threads(request)
    set_thread_variables(request.nproc_per_node)
    with Signals() as signals:
        display = display_of(request)
        try:
            return _Launch(request, run, cluster, signals, display, threads).run()
        finally:
            display.close()


def _threads(request: LaunchRequest) -> dict[str, str]:
    """Return the thread variables of a worker if they are not this machine's share.

    These are the variables that the user set and, on an existing cluster, the number of CPUs that Ray reserves for each
    worker.
    """
    from_environ = {name: value for name in THREAD_VARIABLES if (value := os.environ.get(name))}
    if request.launcher_options.get("address") is None:
        return from_environ
    kept = str(max(1, int(request.launcher_options["cpus"])))
    return {**dict.fromkeys(THREAD_VARIABLES, from_environ.get("OMP_NUM_THREADS", kept)), **from_environ}


class _Launch:
    """One run."""

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, cluster: Cluster, signals: Signals, display: Display,
        threads: dict[str, str],
    ) -> None:  # fmt: skip
        self._request, self._run, self._cluster, self._display = request, run, cluster, display
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()  # "joined", "begun", "stop", or Ray has ended: "left"
        self._verdicts = Verdicts(request, run, display)
        self._channel, side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = WorkerOutput(run, display, side, self._verdicts.add, Epochs(self._report))
        self._stop = Stop(request.timeout_s)
        self._server = RendezvousServer(
            request.nproc_per_node, signals, self._stop, self._send, self._begin, self._add_news
        )
        self._attempt, self._threads = 0, threads
        self._run_id = uuid.uuid4().hex
        # the error for which Ray, or this launcher, could not start the workers
        self._error: DistributedError | None = None

    def run(self) -> int:
        """Run the job until it ends."""
        if lines := [*self._notices(), *self._request.started_lines]:
            self._display.handle({"kind": "started", "lines": lines})
        ray = Subreaper(self._ray, self._run.logs / "ray.log", self._cluster.scratch)
        try:
            self._output.start()
            self._server.start(ray)
            is_judged = self._watch()
            if is_judged:
                self._wait_for_ray()
        finally:
            ray.end()
        self._warn_of_strangers()
        return self._verdicts.finish() if is_judged else self._never_begun()

    def _notices(self) -> list[str]:
        if self._request.launcher_options.get("address") is None or not os.environ.get(VARIABLE):
            return []
        return [
            f"no effect over Ray: {VARIABLE} (Ray's own token protects the cluster; the workers sign with a secret that is generated"
            " for this run)"
        ]

    def _watch(self) -> bool:
        """Judge attempts until the run is over. Return False if it was stopped, or never started, before any
        verdict."""
        if self._news_within(self._cluster.patience_s, self._cluster.late) != "joined":
            return False
        left, patience = self._request.max_restarts, self._request.start_timeout
        too_few = ResourceError(
            f"Ray did not start {self._request.nproc_per_node} workers within start_timeout={patience:g} s: free CPUs of its"
            " cluster ('ray status' shows them), or set a longer one"
        )
        while self._news_within(patience, too_few) == "begun":
            while (verdict := self._verdicts.judge(left)) is Verdict.AT_WORK:
                continue
            self._server.end_attempt(restart=verdict is Verdict.RESTART)
            if verdict is not Verdict.RESTART:
                return True
            left -= 1
        return False

    def _news_within(self, seconds: float, late: DistributedError) -> str:
        """Return the next news. If none arrives in time, set the error `late`: Ray itself may wait for ever."""
        try:
            return self._news.get(timeout=seconds)
        except queue.Empty:
            self._error = late
            return "late"

    def _wait_for_ray(self) -> None:
        """Wait for Ray's orderly end, at most `_RAY_ENDS_S` seconds after the last news."""
        with contextlib.suppress(queue.Empty):
            while self._news.get(timeout=_RAY_ENDS_S) == "begun":
                continue

    def _warn_of_strangers(self) -> None:
        count = self._server.listener.num_refused
        if count:
            self._run.event("strangers_refused", count=count)
            text = f"{count} connections to this launcher were closed: they did not know the secret of this run"
            self._display.handle({"kind": "warning", "text": text})

    def _never_begun(self) -> int:
        error = self._error
        if self._stop.signum or error is None:
            code = self._stop.exit_code if self._stop.signum else 1
            close_results(self._run, code, None, end_elsewhere)
            self._verdicts.show_end(code)
            return code
        close_results(self._run, error.exit_code, str(error), end_elsewhere)
        self._run.event("not_started", cause=str(error))
        if self._request.payload is not None:  # the caller of `fit` raises it
            return error.exit_code
        raise error

    # ------------------------------------------------------------------ Ray's process

    def _ray(self, report: Report) -> None:
        """Run Ray until it ends, or report why it cannot run."""
        logging.basicConfig(level=logging.WARNING)
        try:
            payload = Path(self._request.payload).read_bytes() if self._request.payload is not None else None
            self._cluster.connect(len(payload or b""))
            address = reachable_address(self._cluster.host)
            self._server.listener.listen(address)
            report({"news": "joined"})
            self._cluster.train(self._order(address, payload), self._run.logs.absolute() / "ray")
        except DistributedError as error:
            report({"news": "failed", "error": str(error), "exit_code": error.exit_code})
        except BaseException as error:  # the top frame of a process: the parent must receive every error
            logging.getLogger(__name__).exception("Ray failed")
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
            report(
                {"news": "failed", "error": f"Ray failed ({text}): see {self._run.logs / 'ray.log'}", "exit_code": 3}
            )
        finally:
            self._cluster.leave()

    def _order(self, address: str, payload: bytes | None) -> dict[str, Any]:
        """Return the order that every worker receives when Ray starts it."""
        request = dataclasses.replace(self._request, started_lines=())
        return {
            "address": address, "port": self._server.listener.port, "token": self._server.token,
            # The user's own secret is not sent: whoever may use the cluster can read what Ray carries.
            "secret": secrets.token_hex(32),
            "request": json.loads(request.to_json()), "payload": payload, "cwd": str(Path.cwd()), "run_dir": request.run_dir,
        }  # fmt: skip

    # ------------------------------------------------------------------ the output's thread

    def _report(self, row: Row) -> None:
        """Report a finished epoch to Ray and to the caller of `fit`."""
        self._server.order(op="report", metrics=row)
        write_row(self._request.epochs_fd, row)

    # ------------------------------------------------------------------ the rendezvous server's thread

    def _add_news(self, news: str, error: str | None = None, exit_code: int = 3) -> None:
        """Record the news from Ray's process or a stop, with an error if there is one."""
        if error is not None and self._error is None:
            self._error = ConfigError(error) if exit_code == ConfigError.exit_code else ResourceError(error)
        self._news.put(news)

    def _send(self, **message: Any) -> None:
        self._channel.send(json.dumps(message).encode())

    def _begin(self, workers: dict[int, WorkerConnections]) -> None:
        """Start the workers of an attempt with their ranks, after all have connected."""
        blind = [worker for worker in workers.values() if not worker.hello["sees_run"]]
        if blind:
            self._error = ResourceError(
                f"run directory {str(self._run.path)!r} is not visible to rank {blind[0].hello['rank']} on"
                f" {blind[0].hello['host']}: run from a directory that all nodes of the cluster share"
            )
            self._server.end_attempt(restart=False)
            return
        attach(self._output, workers)
        self._verdicts.begin({rank: rank for rank in workers}, self._attempt)
        environments = self._environments(workers)
        num_nodes = 1 + max(environment.node_rank for environment in environments)
        for environment, worker in zip(environments, workers.values(), strict=True):
            own = loopback_environ() if self._cluster.scratch is not None else {}
            environ = {
                **self._environ(environment, num_nodes),
                **own,
                **gpus_beside(worker, workers.values()),
                **self._threads,
            }
            worker.send(op="start", environ=environ, restart_count=self._attempt, store=self._store_file())
        self._attempt += 1
        self._news.put("begun")

    def _store_file(self) -> str | None:
        """Return the file of the store for this attempt's workers, or None on an existing cluster, where they use a
        port of rank 0."""
        scratch = self._cluster.scratch
        return str(scratch / f"store-{self._attempt}") if scratch is not None else None

    def _environments(self, workers: dict[int, WorkerConnections]) -> list[WorkerEnvironment]:
        """Return the environment of every rank. Ranks of one node are consecutive, as Ray Train numbers them."""
        nodes = list(dict.fromkeys(worker.hello["node"] for worker in workers.values()))
        first = workers[0].hello
        environments: list[WorkerEnvironment] = []
        for rank, worker in workers.items():
            beside = [other for other, one in workers.items() if one.hello["node"] == worker.hello["node"]]
            environments.append(
                WorkerEnvironment(
                    rank, beside.index(rank), len(workers), len(beside), nodes.index(worker.hello["node"]),
                    first["address"], self._request.master_port or first["port"], self._attempt, "environment",
                )
            )  # fmt: skip
        return environments

    def _environ(self, environment: WorkerEnvironment, num_nodes: int) -> dict[str, str]:
        error_file = self._run.logs / f"rank-{environment.rank}.error.json"
        error_file.unlink(missing_ok=True)
        return environment.to_torchrun_environ(
            num_nodes=num_nodes, max_restarts=self._request.max_restarts, run_id=self._run_id, error_file=error_file
        )


def gpus_beside(worker: WorkerConnections, workers: Iterable[WorkerConnections]) -> dict[str, str]:
    """Return the GPUs of all workers on the node of `worker`.

    As under torchrun, every worker sees them all, and LOCAL_RANK selects its own. Ray shows a worker only its own GPU.
    """
    gpus = [gpu for other in workers if other.hello["node"] == worker.hello["node"] for gpu in other.hello["gpus"]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
