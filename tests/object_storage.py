"""An S3 server on loopback, moto's, which a test can make slow, wrong, or silent, and in which it can kill at any request."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

BUCKET = "bucket"
_ACCOUNT = "123456789012"
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


@dataclasses.dataclass
class Fault:
    """The answer to the next `times` requests of `method` whose path contains `path`, in place of the server's own."""

    method: str
    status: int
    code: str
    message: str
    path: str = ""
    times: int = 1 << 30


class S3Server:
    """The server. `env` is what a command needs to use it.

    `writes` counts the objects that were put. `before_write` and `after_write` are called with the number of each, from 1, before it
    is stored and before it is answered.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._accept, self._server.process_request = self._server.process_request, self._count
        self._close, self._server.shutdown_request = self._server.shutdown_request, self._count_off
        self._num_clients = 0
        self._has_left = threading.Condition()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._lock = threading.Lock()
        self.faults: list[Fault] = []
        self.delay_s = 0.0
        self.bytes_per_s = 0.0  # of uploads; 0: no limit
        self.writes = 0
        self.requests: list[str] = []
        self.before_write: Callable[[int], None] = lambda number: None
        self.after_write: Callable[[int], None] = lambda number: None

    def __enter__(self) -> S3Server:
        self._thread.start()
        self._moto().create_bucket(BUCKET, "us-east-1")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._moto().reset()

    def stop(self) -> None:
        """Close the port: further connections are refused."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def calm(self) -> None:
        """Forget faults, delays and hooks, and remove all objects."""
        self.faults, self.delay_s, self.writes, self.requests = [], 0.0, 0, []
        self.before_write = self.after_write = lambda number: None
        for name in list(self.objects()):
            self.remove(name)

    def wait_for_clients(self) -> None:
        """Wait until no client is connected. What a killed client has sent before is still answered."""
        # Connections are accepted in their order, so all earlier ones are counted when this one has an answer.
        with socket.create_connection(("127.0.0.1", self._server.server_port), timeout=60) as last:
            last.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            last.recv(1)
        with self._has_left:
            assert self._has_left.wait_for(lambda: not self._num_clients, 60), (
                f"{self._num_clients} clients are connected"
            )

    @property
    def env(self) -> dict[str, str]:
        port = self._server.server_port
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "AKIATEST",
            "AWS_SECRET_ACCESS_KEY": "do-not-show-me",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return name -> content of the objects whose names begin with `prefix`, without the prefix."""
        keys = self._moto().head_bucket(BUCKET).keys
        return {name.removeprefix(prefix): keys[name].value for name in list(keys) if name.startswith(prefix)}

    def put(self, name: str, content: bytes) -> None:
        self._moto().put_object(BUCKET, name, content)

    def remove(self, name: str) -> None:
        self._moto().delete_object(BUCKET, name)

    def _moto(self) -> Any:
        from moto.s3.models import s3_backends

        return s3_backends[_ACCOUNT]["aws"]

    def _count(self, *connection: Any) -> None:
        with self._has_left:
            self._num_clients += 1
        self._accept(*connection)

    def _count_off(self, connection: Any) -> None:
        self._close(connection)
        with self._has_left:
            self._num_clients -= 1
            self._has_left.notify_all()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        is_write = method == "PUT"
        with self._lock:
            self.requests.append(f"{method} {path}")
            self.writes += is_write
            number = self.writes
            fault = next(
                (each for each in self.faults if each.times and each.method == method and each.path in path), None
            )
            if fault is not None:
                fault.times -= 1
        size = int(environ.get("CONTENT_LENGTH") or 0)
        time.sleep(self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0))
        if is_write:
            self.before_write(number)
        if fault is not None:
            if is_write:
                environ["wsgi.input"].read(size)
            body = _ERROR.format(code=fault.code, message=fault.message).encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start_response(f"{fault.status} Fault", headers)
            return [body if method != "HEAD" else b""]
        answer = self._app(environ, start_response)
        if is_write:
            self.after_write(number)
        return answer


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Listen on loopback, accept connections, and never answer. Yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server with an empty bucket named `BUCKET`."""
    with S3Server() as server:
        yield server


def complete_checkpoints(objects: dict[str, bytes]) -> dict[int, str]:
    """Return step -> name of the checkpoints among `objects` (of one folder) whose every byte is what its manifest says.

    This repeats the format's rules in its own words, without the package. Asserts that none with a manifest is incomplete.
    """
    found = {}
    for name in [name for name in objects if name.endswith("/manifest.json")]:
        folder = name.removesuffix("manifest.json")
        manifest = json.loads(objects[name])
        for file, record in manifest["files"].items():
            content = objects.get(folder + file)
            assert content is not None, f"{name} is there, but {file} is missing"
            assert len(content) == record["bytes"], f"{folder}{file} has {len(content)} bytes, not {record['bytes']}"
            assert xxhash.xxh3_128_hexdigest(content) == record["xxh3_128"], f"{folder}{file} is damaged"
        found[manifest["step"]] = folder.rstrip("/")
    return found
