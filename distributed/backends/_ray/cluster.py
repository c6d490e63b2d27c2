"""Start a Ray cluster or join an existing one, and run the workers of a launch on it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.joining import join
from distributed.backends._ray.placing import OnLost, Placement
from distributed.backends._ray.resources import Missing, Workers, check_cpus, missing, nodes_of
from distributed.config.cores import num_cores
from distributed.config.registry import import_library
from distributed.errors import ConfigError, ResourceError
from distributed.launching.request import LaunchRequest
from distributed.runs.temporary import claim

_REACH_S = 5.0  # time for the port of an existing cluster to answer
_ANSWER_S = 20.0  # time for the server at this port to send its first bytes, even on a busy machine
LOOK_S = 1.0  # time between two looks at the nodes of a cluster
JOIN_S = 180.0  # time for joining an existing cluster, for all attempts together
LOCAL_OBJECT_STORE_BYTES = 10**8
LONGEST_S = 10.0**7  # stands for an unlimited time
_LONGEST_DIRECTORY = 26
_STARTS, _TOO_SLOW = 3, "timed out during startup"
_ADDRESS = re.compile(r"(?:ray://)?(\[[^\[\]]+\]|[^\[\]/:\s]+):(\d+)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names that mean a different machine on each node

OnMissing = Callable[[str, float], None]  # called with what is missing, and the seconds that are left to wait


class Cluster:
    """Ray cluster that runs the workers of a launch."""

    def __init__(self, request: LaunchRequest) -> None:
        options = request.launcher_options
        self._request = request
        self._address: str | None = options.get("address")
        self._group: str | None = options.get("placement_group")
        self._cpus: float = options["cpus"]
        fewest = request.min_nproc_per_node or request.nproc_per_node
        self.workers = Workers(request.num_nodes, fewest, self._cpus, request.device == "cuda")
        # Seconds to wait until the cluster has what the workers need, once it is joined.
        self.wait_s = LONGEST_S if options.get("wait") is True else float(options.get("wait", 0.0))
        self._callbacks: str | None = options.get("callbacks")
        self._ray: Any = None
        self._placement: Placement | None = None
        # files of a cluster that `connect` starts; the caller removes the directory after the cluster has ended
        self.scratch: Path | None = None
        if self._address is None:
            self.scratch = new_scratch()

    @property
    def patience_s(self) -> float:
        """Time limit for `connect`, in seconds."""
        limit = self._request.start_timeout
        return limit if self._address is None else min(limit, JOIN_S)

    @property
    def late(self) -> ResourceError:
        """Error to raise if `connect` takes longer than `patience_s`."""
        if self._address is not None:
            return unreached(self._address, f"no answer within {self.patience_s:g} s")
        return ResourceError(
            f"Ray did not start on this machine within start_timeout={self.patience_s:g} s: set a longer one"
        )

    @property
    def name(self) -> str:
        """The name of the cluster for messages."""
        return "Ray on this machine" if self._address is None else f"the Ray cluster at {self._address}"

    @property
    def host(self) -> str | None:
        """Host of an existing cluster, under the name that the cluster's nodes use. None for a cluster on this machine.
        Call `connect` first."""
        if self._address is None:
            return None
        client_address = _host_and_port(self._address) if self._address.startswith("ray://") else None
        # Use the address that was given to Ray's client, because this machine may reach no other address of the head.
        if client_address is not None and client_address[0] not in _LOOPBACK:
            return client_address[0]
        found = _host_and_port(self._ray.get_runtime_context().gcs_address)
        return found[0] if found is not None else None

    def connect(self, payload_bytes: int, on_missing: OnMissing) -> None:
        """Start or join the cluster, and wait at most `wait_s` for the resources of an existing one.

        `on_missing` is called with what is missing and the seconds that are left. Raises ResourceError if the cluster cannot be
        reached, or has too few resources.
        """
        self._set_environment()
        self._ray = import_library("ray", "ray")
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        if self._address is not None:
            try:
                join(self._ray, self._address, **quiet)
            except ConnectionError as error:
                raise unreached(self._address, str(error)) from None
            self._wait_for_resources(on_missing)
            return
        assert self.scratch is not None
        start_own(self._ray, self.scratch, num_cores(), LOCAL_OBJECT_STORE_BYTES + 2 * payload_bytes, **quiet)

    def look(self) -> tuple[dict[str, str], Missing | None]:
        """Return (id -> name of each node that is alive, the resources that the workers lack or None). Call `connect` first.

        In a trial the second entry is None, because the placement group is not examined.
        """
        nodes = nodes_of(self._ray.nodes())
        is_placed = self._group is not None
        lack = None if is_placed else missing(self.workers, nodes, f"the Ray cluster at {self._address}")
        return {node.id: node.name for node in nodes}, lack

    def train(self, worker_config: Mapping[str, Any], storage: Path, on_lost: OnLost) -> None:
        """Run the workers, with their restarts, until all have ended. See `Placement` for `on_lost`, which Ray Train does not need."""
        placement = Placement(self._ray, self._request, self.workers, worker_config, on_lost)
        if self._group is not None:
            placement.run_in_trial(self._group)
        elif self._request.num_nodes > 1:
            placement.run_on_nodes()
        elif self._request.is_elastic:
            self._placement = placement
            placement.run_as_many_as_fit()
        else:
            self._train(worker_config, storage)

    def errors(self) -> tuple[type[Exception], ...]:
        """Return the classes of errors that Ray raises while its head does not answer. Call `connect` first."""
        return self._ray.exceptions.RayError, RuntimeError, OSError

    def has_ended(self) -> bool:
        """Return whether nobody listens any more at the address of an existing cluster."""
        if self._address is None:
            return False
        try:
            check_address(self._address)
        except ResourceError:
            return True
        return False

    def room(self) -> int:
        """Return how many more workers could be started. Return 0 if the number of workers cannot change."""
        return 0 if self._placement is None else self._placement.room()

    def leave(self) -> None:
        """Leave the cluster, or end it if `connect` started it."""
        if self._ray is not None:
            self._ray.shutdown()

    # ------------------------------------------------------------------ parts

    def _set_environment(self) -> None:
        """Set the variables that Ray reads at import and in its processes."""
        request = self._request
        os.environ.update({
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(request.monitor_interval),
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(max(request.start_timeout, min(self.wait_s, LONGEST_S))),
            "RAY_CHDIR_TO_TRIAL_DIR": "0",
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
            # time limit of each of Ray's three attempts, long enough for a busy head to answer
            "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "10",
        })  # fmt: skip
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._address is None:
            os.environ.update({**own_token(), "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"})
            os.environ.pop("RAY_ADDRESS", None)

    def _wait_for_resources(self, on_missing: OnMissing) -> None:
        """Wait at most `wait_s` until the workers fit. Raises ResourceError if they do not fit then."""
        deadline, shown = time.monotonic() + self.wait_s, None
        while (lack := self.look()[1]) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise lack.error()
            if lack != shown:
                shown = lack
                on_missing(lack.what, left)
            time.sleep(min(LOOK_S, left))

    def _train(self, worker_config: Mapping[str, Any], storage: Path) -> None:
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from distributed.backends._ray.callbacks import made
        from distributed.backends._ray.worker import train

        budget = self._request.max_restarts
        # TorchTrainer adds a process group in each Ray worker. Our process group is in the process that the worker
        # starts.
        DataParallelTrainer(
            train, train_loop_config=dict(worker_config),
            scaling_config=ScalingConfig(
                num_workers=self._request.nproc_per_node, use_gpu=self.workers.is_on_gpu,
                resources_per_worker=self.workers.resources,
            ),
            run_config=RunConfig(
                name="train", storage_path=str(storage),
                failure_config=FailureConfig(max_failures=budget, controller_failure_limit=budget),
                checkpoint_config=CheckpointConfig(num_to_keep=1), callbacks=made(self._callbacks, self._request),
            ),
        ).fit()  # fmt: skip


def own_token() -> dict[str, str]:
    """Return environment variables with a new token for a private cluster. The cluster then ignores a token in the
    user's home."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_own(ray: Any, scratch: Path, cpus: int, object_store_bytes: int, **settings: Any) -> None:
    """Start a private cluster under `own_token`, with its files below `scratch`, and connect to it.

    Raises ResourceError if Ray does not start in time.

    Workaround (Ray 2.60, ray-project/ray#65983; the tries may go when Ray waits for its own services as long as they need): on a
    busy machine Ray gives up a start whose services need more than 15 s. The rest of such a start ends with this process.
    """
    # Workaround (Ray 2.60, no upstream issue known; may go when Ray makes this directory private): Ray makes its
    # directories readable for everyone, this one too, so it is placed inside a private directory.
    directory = str(claim(scratch) / "r")
    for left in reversed(range(_STARTS)):
        try:
            with _on_loopback():
                ray.init(
                    "local", num_cpus=cpus, include_dashboard=False, object_store_memory=object_store_bytes, _temp_dir=directory,
                    # Ray Train's workers need their own environment, so Ray could not use prestarted worker processes.
                    _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False}, **settings,
                )  # fmt: skip
            return
        except Exception as error:  # Ray raises no subclass here, so the text tells
            if _TOO_SLOW not in str(error):
                raise
            if not left:
                raise ResourceError(
                    f"Ray gave up {_STARTS} starts on this machine, because its own services did not start in time: run again when the"
                    " machine is less busy"
                ) from error


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray's servers listen on the loopback interface only.

    Workaround (Ray 2.60, ray-project/ray#26293; may go when Ray keeps the given address): on Linux Ray replaces a given
    127.0.0.1 by another address of this machine, and its servers then listen on all interfaces (`ENABLE_RAY_CLUSTER`).
    On macOS it does not.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def new_scratch() -> Path:
    """Return a directory name for the files of a private cluster. It is short, because the paths of Ray's sockets
    below it may have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _LONGEST_DIRECTORY else "/tmp", f"ray-{secrets.token_hex(4)}")


def check_placement(address: str | None, processes: int, cpus: float) -> None:
    """Raise an error if the address cannot be a Ray cluster or this machine has too few CPUs. Does not load Ray."""
    if address is None:
        check_cpus(processes, cpus, num_cores(), "this machine")
    else:
        check_address(address)


def check_address(address: str) -> None:
    """Raise an error if the address is not that of a Ray cluster, or no cluster listens there. Does not load Ray."""
    if (host_and_port := _host_and_port(address)) is not None:
        _reach(address, *host_and_port)
    elif address != "auto":
        scheme, _, rest = address.rpartition("://")
        host = re.sub(r":[^:\]]*\Z", "", rest) or "HOST"
        like = f"ray://{host}:10001" if scheme == "ray" else f"{host}:6379, ray://{host}:10001 or auto"
        raise ConfigError(f"{_setting(address)} is not of the form HOST:PORT or ray://HOST:PORT: set it to {like}")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT`, `[::1]:PORT` or `ray://HOST:PORT`, or None for `auto` and the like."""
    match = _ADDRESS.fullmatch(address)
    return (match[1].strip("[]"), int(match[2])) if match and int(match[2]) < 1 << 16 else None


def _setting(address: str) -> str:
    """Return `NAME='ADDRESS'`, with the name of the setting or variable from which the address comes."""
    name = "RAY_ADDRESS" if address == os.environ.get("RAY_ADDRESS") else "address"
    return f"{name}={address!r}"


def unreached(address: str, output: str) -> ResourceError:
    """Return the error for a cluster that Ray cannot reach."""
    if address == "auto":
        return ResourceError(
            f"{_setting(address)} finds no Ray cluster on this machine: start one with 'ray start --head', name one as HOST:PORT, or"
            " drop it to start a cluster for this run"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    return ResourceError(
        f"the Ray cluster at {address} could not be joined ({lines[-1] if lines else 'no answer'}): 'ray status' there shows whether"
        " it is healthy; both sides need the same version of Ray and the same RAY_AUTH_MODE: if 'ray start' there said 'Token"
        " authentication is enabled', set RAY_AUTH_MODE=token here, and the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _reach(address: str, host: str, port: int) -> None:
    """Raise ResourceError if no Ray cluster listens at the address.

    Workaround (Ray 2.60, no upstream issue known; may go when `ray.init` has a time limit): Ray would wait for ever.
    """
    try:
        connection = socket.create_connection((host, port), timeout=_REACH_S)
    except socket.gaierror as error:
        raise ResourceError(
            f"{_setting(address)} names no host that this machine knows ({error.strerror}): correct it, or drop it to start a"
            " cluster for this run"
        ) from None
    except OSError as error:
        raise ResourceError(
            f"{_setting(address)} does not answer ({error.strerror or error}): start a cluster there with 'ray start --head',"
            " or drop it to start a cluster for this run"
        ) from None
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(connection):
            raise ResourceError(
                f"{_setting(address)} is not an address of Ray: name the port that 'ray start --head' printed (6379), or ray://HOST:10001"
            )


def _speaks_grpc(connection: socket.socket) -> bool:
    """Return True if the other side begins with a SETTINGS frame, as every HTTP/2 server does (RFC 9113, 3.4)."""
    connection.settimeout(_ANSWER_S)
    header = b""
    with contextlib.suppress(OSError):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while len(header) < 4 and (more := connection.recv(64)):
            header += more
    return header[3:4] == b"\4"
