"""Launch workers over Ray. Ray Train places and restarts the workers. This launcher decides how an attempt ended, and
displays it.

Ray runs in a separate process. In the launcher's process one thread runs the rendezvous server, one reads the workers'
output, and the main thread decides whether to restart.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.backends._ray.cluster import LOOK_S, Cluster
from distributed.backends._ray.hellos import environments_of, gpus_beside, node_names, objection
from distributed.backends._ray.patience import Patience
from distributed.backends._ray.rendezvous import RendezvousServer, WorkerConnections, attach
from distributed.backends._ray.reports import missing
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launching.elastic import WorkerCount
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.epochs import Epochs, write_line
from distributed.launching.hang_check import HangCheck
from distributed.launching.listening import loopback_environ, reachable_address
from distributed.launching.nodes import names_of
from distributed.launching.output import WorkerOutput, display_of
from distributed.launching.request import LaunchRequest
from distributed.launching.script import check_script
from distributed.launching.secret import VARIABLE
from distributed.launching.slow_check import SlowCheck
from distributed.launching.stopping import Signals, Stop
from distributed.launching.subreaper import Subreaper
from distributed.launching.variables import THREAD_VARIABLES, set_thread_variables
from distributed.launching.verdicts import Verdict, Verdicts
from distributed.launching.worker_reports import WorkerReports
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import REGROUP_SIGNAL, STOP_SIGNALS
from distributed.runs.summary import close_results
from distributed.state import EpochMetrics, OnEvent

_NODE_LOST_S = 60.0  # time for Ray to detect that a node was killed; with Ray's defaults this takes up to 50 s
_LAST_LOOK_S = 5.0  # time for a look at the nodes of the cluster to end
_RAY_ENDS_S = 30.0  # time for Ray to shut down when the run is over; after that it is killed


def serve(request: LaunchRequest) -> int:
    """Run the job of `request` in workers that Ray places, and return the exit code. Raises DistributedError if the run
    fails before the first worker starts."""
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
    """Return the variables that set a worker's number of threads. The default is the worker's share of this machine.

    They are the variables that the user set and, on an existing cluster, the number of CPUs that Ray reserves for each
    worker.
    """
    from_environ = {name: value for name in THREAD_VARIABLES if (value := os.environ.get(name))}
    if request.launcher_options.get("address") is None:
        return from_environ
    kept = str(max(1, int(request.launcher_options["cpus"])))
    return {**dict.fromkeys(THREAD_VARIABLES, from_environ.get("OMP_NUM_THREADS", kept)), **from_environ}


class _Launch:
    """One launch over Ray: its worker attempts, their verdicts and the thread and process that run beside it."""

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, cluster: Cluster, signals: Signals, display: Display,
        threads: dict[str, str],
    ) -> None:  # fmt: skip
        self._request, self._run, self._cluster, self._display = request, run, cluster, display
        self._patience = Patience(run, display, request.node_timeout)
        self._verdicts = Verdicts(request, run, display)
        self._channel, side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = WorkerOutput(run, display, side, self._take, Epochs(self._report))
        self._stop = Stop(request.timeout_s)
        self._reports = WorkerReports(lambda **command: self._server.send_to_all(**command), missing)
        self._server = RendezvousServer(
            signals, self._stop, self._send, self._begin, self._reports.add, self._add_news
        )  # fmt: skip
        self._hangs = HangCheck(request, run, self._reports, self._reports.inspect, lambda rank: self._node_of(rank)[0])
        self._slow = SlowCheck(run, display, self._reports, self._node_of)
        self._verdicts.find_hang = lambda: self._hangs.find_late(self._verdicts.watched.values())
        self._world_size = 0  # number of workers of the newest attempt
        self._names: dict[int, str] = {}  # names of the nodes of the newest attempt
        self._name_of: dict[int, str] = {}  # rank -> the name of its node
        self._count, self._room = WorkerCount(request), 0  # `_room`: number of further workers that could be started
        self._attempt, self._threads = 0, threads
        self._run_id = uuid.uuid4().hex
        # why Ray or this launcher could not start the workers
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
            try:
                ray.end()
            finally:
                self._server.close()
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
        """Wait for the verdict on each attempt until the run is over. Return False if the run ended without a verdict,
        because it was stopped or did not start."""
        if self._news_within(self._cluster.patience_s, self._cluster.late) != "joined":
            return False
        left, limit = self._request.max_restarts, self._request.start_timeout
        fewest = self._cluster.workers.num_nodes * self._cluster.workers.per_node
        too_few = ResourceError(
            f"Ray did not start {fewest} workers within start_timeout={limit:g} s: free CPUs"
            f"{' and GPUs' if self._request.device == 'cuda' else ''} of its cluster ('ray status' shows them), or set a longer one"
        )
        seconds, before, is_failure = max(limit, self._cluster.wait_s), 0, False
        while (news := self._news_within(seconds, too_few, "start_timeout")) == "begun":
            left += is_failure and self._world_size < before  # nodes were lost, which does not count as a failure
            before = self._world_size
            self._count.begin()
            self._hangs.begin()
            self._slow.begin()
            while (verdict := self._verdicts.judge(left)) is Verdict.AT_WORK:
                self._look_at_progress()
                if self._stop.signum or not self._verdicts.trains:
                    continue
                if self._count.may_grow(self._room, has_saved=self._verdicts.has_saved):
                    self._server.send_to_all(op="signal", signum=int(REGROUP_SIGNAL))  # the workers save and end
            self._see_silent_nodes()
            if verdict is Verdict.OVER and self._has_lost_a_node():
                verdict = Verdict.REGROUP
            is_failure = verdict is Verdict.RESTART
            goes_on = is_failure or verdict is Verdict.REGROUP
            self._server.end_attempt(restart=goes_on)
            if not goes_on:
                return True
            left, seconds = left - is_failure, limit
        if news == "left" and not self._stop.signum and self._error is None:
            self._error = ResourceError(self._head_lost())
        return False

    def _look_at_progress(self) -> None:
        """Restart the workers if one of them hangs, and name one that is slow."""
        attempt = self._reports.attempt
        hang = self._hangs.find(
            self._verdicts.watched.values()
        )  # meanwhile, workers may be lost, and Ray may start others
        with self._reports.held(attempt) as is_same:
            if hang is not None and is_same:
                self._verdicts.blame(hang)
        self._slow.look(self._verdicts.watched.values())

    def _node_of(self, rank: int) -> tuple[str, str]:
        """Return (the name of the node of a rank, or "" if there is only one node; its host name)."""
        name = self._name_of.get(rank, "")
        return name if len(self._names) > 1 else "", name

    def _head_lost(self) -> str:
        how = f"{self._cluster.name} has ended before the run, for example because its head node was lost"
        return f"{how}: see {self._run.logs / 'ray.log'}"

    def _has_lost_a_node(self) -> bool:
        """Return whether the workers of an elastic run failed because a node left the cluster.

        Ray may detect this later than the launcher detects that workers have gone without an exit status, or that workers on
        other nodes have lost their connections.
        """
        cause = self._verdicts.cause
        may_be = self._server.num_lost or (cause is not None and cause.is_consequence)
        if not self._request.is_elastic or not may_be:
            return False
        deadline = time.monotonic() + _NODE_LOST_S
        while not self._stop.signum and time.monotonic() < deadline and not self._patience.has_lost_a_node:
            time.sleep(0.1)
            self._see_silent_nodes()  # the workers may detect a cut network before the launcher does
        return not self._stop.signum and self._patience.has_lost_a_node

    def _see_silent_nodes(self) -> None:
        """Record the nodes that do not answer. Ray itself may detect a minute later that they are lost."""
        if silent := self._server.silent():
            needs = "Ray has not started its workers on another one"  # an elastic run needs no other node
            self._patience.saw_nodes([*silent], None if self._request.is_elastic else needs, "does not answer")

    def _news_within(self, seconds: float, late: DistributedError, name: str = "") -> str:
        """Wait at most `seconds` for news, and return them. If there are none, record the error and return "late"."""
        news = self._patience.news_within(seconds, late, name)
        self._error = self._error or self._patience.error
        return news

    def _wait_for_ray(self) -> None:
        """Wait until Ray has shut down, at most `_RAY_ENDS_S` seconds after the last news."""
        while self._patience.news_within(_RAY_ENDS_S, ResourceError(""), "") == "begun":
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
        if self._request.payload is not None:  # the process that called `fit` raises the error
            return error.exit_code
        raise error

    # ------------------------------------------------------------------ Ray's process

    def _ray(self, on_event: OnEvent) -> None:
        """Run Ray until it ends, or report why it cannot run. Called in Ray's process."""
        logging.basicConfig(level=logging.WARNING)
        if self._cluster.scratch is None:
            # Ray sends SIGTERM to all processes of a job that is stopped. This process must not end before the workers have saved.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch_nodes, args=(on_event, is_over), name="nodes of Ray", daemon=True)
        try:
            payload = Path(self._request.payload).read_bytes() if self._request.payload is not None else None
            self._cluster.connect(
                len(payload or b""), lambda what, left: on_event({"news": "missing", "what": what, "left": left})
            )
            address = reachable_address(self._cluster.host)
            self._server.listener.listen(address)
            on_event({"news": "joined"})
            if self._cluster.scratch is None:
                watch.start()
            self._cluster.train(
                self._worker_config(address, payload), self._run.logs.absolute() / "ray",
                lambda attempt: on_event({"news": "lost", "attempt": attempt}),
            )  # fmt: skip
        except DistributedError as error:
            on_event({"news": "failed", "error": str(error), "exit_code": error.exit_code})
        except BaseException as error:  # the top frame of a process: the parent must receive every error
            logging.getLogger(__name__).exception("Ray failed")
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")
            failed = f"Ray failed ({text}): see {self._run.logs / 'ray.log'}"
            shown = self._head_lost() if self._cluster.has_ended() else failed
            on_event({"news": "failed", "error": shown, "exit_code": 3})
        finally:
            is_over.set()
            if watch.ident is not None:
                watch.join(_LAST_LOOK_S)  # after `leave`, a look could start a cluster
            self._cluster.leave()

    def _watch_nodes(self, on_event: OnEvent, is_over: threading.Event) -> None:
        """Report the nodes that leave the cluster, and what the workers then lack. Runs in a thread of Ray's process."""
        alive, lack = self._cluster.look()
        roomy, is_silent = 0, False
        while not is_over.wait(LOOK_S):
            before, lacked = alive, lack
            try:
                now = self._cluster.look()
                room = self._cluster.room()
            except self._cluster.errors() as error:  # the head does not answer, which may pass
                if not is_silent:
                    logging.getLogger(__name__).warning("the cluster does not say what it has: %s", error)
                is_silent = True
                continue
            is_silent, (alive, lack) = False, now
            gone = sorted(before.keys() - alive.keys())
            if room != roomy:
                roomy = room
                on_event({"news": "room", "count": room})
            if gone or lack != lacked:
                on_event({"news": "nodes", "gone": gone, "what": None if lack is None else lack.what})

    def _worker_config(self, address: str, payload: bytes | None) -> dict[str, Any]:
        """Return the configuration that every worker receives when Ray starts it."""
        request = dataclasses.replace(self._request, started_lines=())
        return {
            "address": address, "port": self._server.listener.port, "token": self._server.token,
            # Send a new secret, not the user's own: every user of the cluster can read what Ray transmits.
            "secret": secrets.token_hex(32),
            "request": json.loads(request.to_json()), "payload": payload, "cwd": str(Path.cwd()), "run_dir": request.run_dir,
        }  # fmt: skip

    # ------------------------------------------------------------------ the output's thread

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "exit" and not message["is_lost"]:
            log = functools.partial(self._output.log, message["local_rank"])
            self._verdicts.add_end(message, self._reports, log)
        else:
            self._verdicts.add(message)

    def _report(self, metrics: EpochMetrics) -> None:
        """Report a finished epoch to Ray and to the caller of `fit`."""
        self._server.send_to_all(op="report", metrics=metrics)
        write_line(self._request.epochs_fd, metrics)

    # ------------------------------------------------------------------ the rendezvous server's thread

    def _add_news(
        self, news: str, error: str | None = None, exit_code: int = 3, *, gone: Sequence[str] = (), what: str | None = None,
        left: float = 0.0, count: int = 0,
    ) -> None:  # fmt: skip
        """Record news from Ray's process, or that a stop was requested, with the error if there is one."""
        if news == "nodes":
            self._patience.saw_nodes(gone, what)
            return
        if news == "room":
            self._room = count
            return
        if news == "missing":
            self._patience.put((str(what), left))
            return
        if error is not None and self._error is None:
            self._error = ConfigError(error) if exit_code == ConfigError.exit_code else ResourceError(error)
        self._patience.put(news)

    def _send(self, **message: Any) -> None:
        if message["op"] == "exit":
            self._reports.end(message["local_rank"])
        self._channel.send(json.dumps(message).encode())

    def _begin(self, workers: dict[int, WorkerConnections]) -> None:
        """Start the training processes of an attempt, after all its workers have connected."""
        if (problem := objection(workers, self._run.path)) is not None:
            self._error = ResourceError(problem)
            self._server.end_attempt(restart=False)
            return
        if 0 < self._world_size != len(workers):
            text = f"going on with {len(workers)} process{'es' * (len(workers) > 1)}"
            self._display.handle({"kind": "notice", "text": text})
        self._world_size = len(workers)
        attach(self._output, workers)
        self._reports.begin()  # before the verdicts begin, so that no hang of the last attempt is blamed on this one
        names = node_names(workers)
        self._verdicts.begin(
            {rank: rank for rank in workers}, self._attempt, names if len({*names.values()}) > 1 else {}
        )
        by_node = dict(enumerate(dict.fromkeys(names.values())))
        if len(by_node) > 1 and by_node != self._names:
            self._display.handle({"kind": "notice", "text": names_of(by_node)})
        self._names, self._name_of = by_node, names
        self._patience.begin({worker.hello["node"]: names[rank] for rank, worker in workers.items()})
        environments = environments_of(workers, self._request.master_port, self._attempt)
        num_nodes = 1 + max(environment.node_rank for environment in environments)
        is_even = len({environment.local_world_size for environment in environments}) == 1
        even = num_nodes if is_even else 1
        processes = {"num_nodes": even, "nproc_per_node": len(workers) // even}
        if self._request.is_elastic:  # pass the largest number, which sets the global batch
            processes = {"num_nodes": 1, "nproc_per_node": self._request.nproc_per_node}
        nodes = {worker.hello["node"]: worker.hello["addresses"] for worker in workers.values()}
        for environment, worker in zip(environments, workers.values(), strict=True):
            own = loopback_environ() if self._cluster.scratch is not None else {}
            environ = {
                **self._environ(environment, num_nodes),
                **self._verdicts.environ,
                **own,
                **gpus_beside(worker, workers.values()),
                **self._threads,
            }
            worker.send(
                op="start", environ=environ, restart_count=self._attempt, store=self._store_file(), processes=processes,
                nodes=[*nodes.values()], node_rank=environment.node_rank,
            )  # fmt: skip
        self._attempt += 1
        self._patience.put("begun")

    def _store_file(self) -> str | None:
        """Return the file of the store for this attempt's workers. Return None on an existing cluster, where the store
        is on a port of rank 0."""
        scratch = self._cluster.scratch
        return str(scratch / f"store-{self._attempt}") if scratch is not None else None

    def _environ(self, environment: WorkerEnvironment, num_nodes: int) -> dict[str, str]:
        error_file = self._run.logs / f"rank-{environment.rank}.error.json"
        error_file.unlink(missing_ok=True)
        return environment.to_torchrun_environ(
            num_nodes=num_nodes, max_restarts=self._request.max_restarts, run_id=self._run_id, error_file=error_file
        )
