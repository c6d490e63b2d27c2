"""A real MLflow server on loopback, behind a door that a test can open, shut or make slow."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


class Door(http.server.ThreadingHTTPServer):
    """Passes requests on to `port` as its `mode` says: "open", "late" (each after `late_s`), "slow" (none before `let_go`),
    "shut" (no answer) or "denied" (401). Paths with `broken` in them are answered with 503."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.port, self.mode, self.num_asked, self.late_s = port, "open", 0, 0.0
        self.broken = ""
        self._go = threading.Event()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def let_go(self) -> None:
        """Answer those who wait, and all from now on."""
        self.mode = "open"
        self._go.set()

    def is_held(self) -> bool:
        """Whether this request is not to be answered; returns when it is known."""
        self.num_asked += 1
        if self.mode in ("slow", "late"):
            self._go.wait(30 if self.mode == "slow" else self.late_s)
        return self.mode == "shut"

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever waited in vain has gone."""


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Door

    def do_GET(self) -> None:
        if self.server.is_held():
            self.connection.close()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.broken and self.server.broken in self.path:
            self.send_error(503)
            return
        if self.server.mode == "denied":
            self.send_error(401)
            return
        onward = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        with contextlib.closing(onward):
            onward.request(self.command, self.path, body, dict(self.headers))
            answer = onward.getresponse()
            content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@contextlib.contextmanager
def mlflow_server(directory: Path) -> Iterator[int]:
    """The port of an `mlflow server` with an SQLite store in `directory`."""
    argv = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "0", "--workers", "1",
        "--backend-store-uri", f"sqlite:///{directory / 'server.db'}", "--artifacts-destination", str(directory / "art"),
    ]  # fmt: skip
    log = directory / "server.log"
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        yield _port(server, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    from tests.conftest import poll

    def said() -> int:
        found = re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        return int(found[1]) if found else 0

    return int(poll(said, 120, lambda: log.read_text(errors="replace"), lambda: server.poll() is not None))


@contextlib.contextmanager
def door(port: int) -> Iterator[Door]:
    """An open door to the server at `port`."""
    opened = Door(port)
    thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield opened
    finally:
        opened.let_go()
        opened.shutdown()
        thread.join()
        opened.server_close()
