"""The Ray side of a launch: its own cluster or an existing one, and Ray Train on it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.joining import join
from distributed.config.registry import import_library
from distributed.errors import ConfigError, ResourceError
from distributed.launching.request import LaunchRequest
from distributed.runs.temporary import claim

_REACH_S = 5.0  # time for the port of an existing cluster to answer
_ANSWER_S = 20.0  # time for its server to send its first bytes, also on a busy machine
_JOIN_S = 180.0  # time for joining it, all tries together
LOCAL_OBJECT_STORE_BYTES = 10**8
_LONGEST_DIRECTORY = 26
_ADDRESS = re.compile(r"(?:ray://)?(\[[^\[\]]+\]|[^\[\]/:\s]+):(\d+)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names that mean a different machine on each node


class Cluster:
    """Ray cluster that runs the workers of a launch."""

    def __init__(self, request: LaunchRequest) -> None:
        options = request.launcher_options
        self._request = request
        self._address: str | None = options.get("address")
        self._group: str | None = options.get("placement_group")
        self._cpus: float = options["cpus"]
        self._callbacks: str | None = options.get("callbacks")
        self._ray: Any = None
        # directory for the files of its own cluster; the caller that ends the cluster removes it
        self.scratch: Path | None = None
        if self._address is None:
            self.scratch = new_scratch()

    @property
    def patience_s(self) -> float:
        """Time limit for `connect`, in seconds."""
        limit = self._request.start_timeout
        return limit if self._address is None else min(limit, _JOIN_S)

    @property
    def late(self) -> ResourceError:
        """Error to raise if `connect` takes longer than `patience_s`."""
        if self._address is not None:
            return _unreached(self._address, f"no answer within {self.patience_s:g} s")
        return ResourceError(
            f"Ray did not start on this machine within start_timeout={self.patience_s:g} s: set a longer one"
        )

    @property
    def host(self) -> str | None:
        """Host of the existing cluster, as its nodes name it. None for a cluster on this machine. Call `connect`
        first."""
        if self._address is None:
            return None
        client_address = _host_and_port(self._address) if self._address.startswith("ray://") else None
        # the address given to Ray's client; the client may reach no other
        if client_address is not None and client_address[0] not in _LOOPBACK:
            return client_address[0]
        found = _host_and_port(self._ray.get_runtime_context().gcs_address)
        return found[0] if found is not None else None

    def connect(self, payload_bytes: int) -> None:
        """Start or join the cluster. Raises ResourceError if it has too few CPUs or cannot be reached."""
        self._set_environment()
        self._ray = import_library("ray", "ray")
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
        if self._address is not None:
            try:
                join(self._ray, self._address, **quiet)
            except ConnectionError as error:
                raise _unreached(self._address, str(error)) from None
            self._check_resources()
            return
        assert self.scratch is not None
        start_own(self._ray, self.scratch, _local_cpus(), LOCAL_OBJECT_STORE_BYTES + 2 * payload_bytes, **quiet)

    def train(self, order: Mapping[str, Any], storage: Path) -> None:
        """Run the workers until all of them have ended and none is restarted."""
        if self._group is not None:
            self._train_in_group(order)
        else:
            self._train(order, storage)

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
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(request.start_timeout),
            "RAY_CHDIR_TO_TRIAL_DIR": "0",
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
            # limit of each of three tries, so that a busy head can answer
            "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "10",
        })  # fmt: skip
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._address is None:
            os.environ.update({**own_token(), "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"})
            os.environ.pop("RAY_ADDRESS", None)

    def _check_resources(self) -> None:
        resources = self._ray.cluster_resources()
        where = f"the Ray cluster at {self._address}"
        if self._group is None:
            check_cpus(self._request.nproc_per_node, self._cpus, resources.get("CPU", 0.0), where)
        if self._request.device == "cuda" and resources.get("GPU", 0) < self._request.nproc_per_node:
            raise ResourceError(
                f"nproc_per_node={self._request.nproc_per_node} needs as many GPUs, but {where} has"
                f" {resources.get('GPU', 0):g}: set nproc_per_node={max(1, int(resources.get('GPU', 0)))}, or --device cpu"
            )

    def _train(self, order: Mapping[str, Any], storage: Path) -> None:
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from distributed.backends._ray.callbacks import made
        from distributed.backends._ray.worker import train

        budget = self._request.max_restarts
        is_gpu = self._request.device == "cuda"
        # TorchTrainer adds a process group in each Ray worker. Our process group is in the process that the worker
        # starts.
        DataParallelTrainer(
            train, train_loop_config=dict(order),
            scaling_config=ScalingConfig(
                num_workers=self._request.nproc_per_node, use_gpu=is_gpu,
                resources_per_worker={"CPU": self._cpus, **({"GPU": 1} if is_gpu else {})},
            ),
            run_config=RunConfig(
                name="train", storage_path=str(storage),
                failure_config=FailureConfig(max_failures=budget, controller_failure_limit=budget),
                checkpoint_config=CheckpointConfig(num_to_keep=1), callbacks=made(self._callbacks, self._request),
            ),
        ).fit()  # fmt: skip

    def _train_in_group(self, order: Mapping[str, Any]) -> None:
        """Run the workers in the placement group of a trial, whose first bundle holds the trial itself. Ray Train
        would request another group."""
        from ray.util.placement_group import PlacementGroup
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from distributed.backends._ray.worker import Restart, work

        ray = self._ray
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(str(self._group))))
        bundle_indices = self._bundle_indices(group.bundle_specs)
        task = ray.remote(max_retries=0)(work)
        is_wanted = True
        while is_wanted:
            tasks = [
                task.options(
                    num_cpus=self._cpus, num_gpus=int(self._request.device == "cuda"),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_index),
                ).remote(order, rank)
                for rank, bundle_index in enumerate(bundle_indices)
            ]  # fmt: skip
            failed = [_has_failed(ray, each, Restart) for each in tasks]  # the list waits for all tasks
            is_wanted = any(failed)

    def _bundle_indices(self, bundles: list[dict[str, float]]) -> list[int]:
        """Return the bundle of each rank. Raises ResourceError if the ranks do not fit."""
        wanted = {"CPU": self._cpus, **({"GPU": 1.0} if self._request.device == "cuda" else {})}
        bundle_indices = [
            index
            for index, bundle in enumerate(bundles)
            for _ in range(int(min(bundle.get(name, 0.0) / amount for name, amount in wanted.items())))
            if index > 0
        ]
        processes = self._request.nproc_per_node
        if len(bundle_indices) < processes:
            raise ResourceError(
                f"nproc_per_node={processes} is more than the {len(bundle_indices)} that fit into the trial's placement group beside the"
                f" trial: give it tune.PlacementGroupFactory([{{'CPU': 1}}] + [{wanted}] * {processes})"
            )
        return bundle_indices[:processes]


def own_token() -> dict[str, str]:
    """Return the environment of a private cluster. It reads its token only from there, not from the user's home."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_own(ray: Any, scratch: Path, cpus: int, object_store_bytes: int, **settings: Any) -> None:
    """Start a private cluster under `own_token`, with its files below `scratch`, and connect to it."""
    with _on_loopback():
        ray.init(
            "local", num_cpus=cpus, include_dashboard=False, object_store_memory=object_store_bytes,
            # Ray makes its directories readable for everyone, this one too, so it is placed inside a private directory.
            _temp_dir=str(claim(scratch) / "r"),
            # Workers of Ray Train have an environment of their own, so prestarted workers would not be used.
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False}, **settings,
        )  # fmt: skip


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray's servers listen on the loopback interface only.

    On Linux Ray replaces a given 127.0.0.1 by another address of this machine, and its servers then listen on all
    interfaces (Ray 2.60, `ENABLE_RAY_CLUSTER`). On macOS it does not. This can go when Ray keeps the given address.
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
    """Raise ResourceError if the workers have no place, as far as that is known without Ray."""
    if address is None:
        check_cpus(processes, cpus, _local_cpus(), "this machine")
    elif (host_and_port := _host_and_port(address)) is not None:
        _reach(address, *host_and_port)
    elif address != "auto":
        scheme, _, rest = address.rpartition("://")
        host = re.sub(r":[^:\]]*\Z", "", rest) or "HOST"
        like = f"ray://{host}:10001" if scheme == "ray" else f"{host}:6379, ray://{host}:10001 or auto"
        raise ConfigError(f"{_setting(address)} is not of the form HOST:PORT or ray://HOST:PORT: set it to {like}")


def check_cpus(processes: int, cpus: float, there: float, where: str) -> None:
    """Raise ResourceError if there are too few CPUs. Ray would wait for them for ever."""
    if processes * cpus <= there:
        return
    if there < cpus:
        raise ResourceError(
            f"ray.cpus_per_worker={cpus:g} is more than the {there:g} CPUs of {where}: set it to {there:g}"
        )
    raise ResourceError(
        f"nproc_per_node={processes} with ray.cpus_per_worker={cpus:g} needs {processes * cpus:g} CPUs, but {where} has"
        f" {there:g}: set nproc_per_node={int(there / cpus)}, or ray.cpus_per_worker={int(1000 * there / processes) / 1000:g}"
    )


def _local_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _has_failed(ray: Any, task: Any, wanted: type[Exception]) -> bool:
    """Wait for a worker. Return True if its end requires all workers to start again."""
    try:
        ray.get(task)
    except (wanted, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
        return True
    return False


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT`, `[::1]:PORT` or `ray://HOST:PORT`, or None for `auto` and the like."""
    match = _ADDRESS.fullmatch(address)
    return (match[1].strip("[]"), int(match[2])) if match and int(match[2]) < 1 << 16 else None


def _setting(address: str) -> str:
    """Return the address with the name of the setting that gave it."""
    name = "RAY_ADDRESS" if address == os.environ.get("RAY_ADDRESS") else "address"
    return f"{name}={address!r}"


def _unreached(address: str, output: str) -> ResourceError:
    """Return the error for a cluster that Ray cannot reach."""
    if address == "auto":
        return ResourceError(
            f"{_setting(address)} finds no Ray cluster on this machine: start one with 'ray start --head', name one as HOST:PORT, or"
            " drop it to use one of its own"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    return ResourceError(
        f"the Ray cluster at {address} could not be joined ({lines[-1] if lines else 'no answer'}): 'ray status' there shows whether"
        " it is healthy; both sides need the same version of Ray and the same RAY_AUTH_MODE"
    )


def _reach(address: str, host: str, port: int) -> None:
    """Raise ResourceError if nothing listens, or something other than Ray. Ray itself would wait there for ever."""
    try:
        connection = socket.create_connection((host, port), timeout=_REACH_S)
    except socket.gaierror as error:
        raise ResourceError(
            f"{_setting(address)} names no host that this machine knows ({error.strerror}): correct it, or drop it to use a"
            " cluster of its own"
        ) from None
    except OSError as error:
        raise ResourceError(
            f"{_setting(address)} does not answer ({error.strerror or error}): start a cluster there with 'ray start --head',"
            " or drop it to use one of its own"
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
