"""The Ray side of a launch: a cluster of its own or an existing one, and Ray Train on it."""

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

_REACH_S = 5.0  # for the port of an existing cluster to answer
_ANSWER_S = 20.0  # for its server to say a first word, on a busy machine too
_JOIN_S = 180.0  # for joining it: all tries
LOCAL_OBJECT_STORE_BYTES = 10**8
_LONGEST_DIRECTORY = 26
_ADDRESS = re.compile(r"(?:ray://)?(\[[^\[\]]+\]|[^\[\]/:\s]+):(\d+)")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")  # which every node takes for itself


class Cluster:
    """Where the workers of a launch run."""

    def __init__(self, request: LaunchRequest) -> None:
        options = request.launcher_options
        self._request = request
        self._address: str | None = options.get("address")
        self._group: str | None = options.get("placement_group")
        self._cpus: float = options["cpus"]
        self._callbacks: str | None = options.get("callbacks")
        self._ray: Any = None
        self.scratch: Path | None = None  # the files of a cluster of its own; whoever ends it removes them
        if self._address is None:
            self.scratch = new_scratch()

    @property
    def patience_s(self) -> float:
        """What `connect` may take."""
        limit = self._request.start_timeout
        return limit if self._address is None else min(limit, _JOIN_S)

    @property
    def late(self) -> ResourceError:
        """What to do where it takes longer."""
        if self._address is not None:
            return _unreached(self._address, f"no answer within {self.patience_s:g} s")
        return ResourceError(
            f"Ray did not start on this machine within start_timeout={self.patience_s:g} s: wait longer"
        )

    @property
    def host(self) -> str | None:
        """A host of the existing cluster, as its nodes name it; None where it is this machine's own. After `connect`."""
        if self._address is None:
            return None
        given = _host_and_port(self._address) if self._address.startswith("ray://") else None
        if given is not None and given[0] not in _LOOPBACK:  # of a client: it may see no other
            return given[0]
        found = _host_and_port(self._ray.get_runtime_context().gcs_address)
        return found[0] if found is not None else None

    def connect(self, payload_bytes: int) -> None:
        """Start or join the cluster. Raises ResourceError where it has too few CPUs, or is not to be reached."""
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
        """Run the workers until all of them have ended for good."""
        if self._group is not None:
            self._train_in_group(order)
        else:
            self._train(order, storage)

    def leave(self) -> None:
        """End what `connect` began."""
        if self._ray is not None:
            self._ray.shutdown()

    # ------------------------------------------------------------------ parts

    def _set_environment(self) -> None:
        """Read by Ray at import and in its processes."""
        request = self._request
        os.environ.update({
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(request.monitor_interval),
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(request.start_timeout),
            "RAY_CHDIR_TO_TRIAL_DIR": "0",
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
            "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "10",  # of three tries, for a busy head to say its first word
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
                f"nproc_per_node={self._request.nproc_per_node} needs as many GPUs, and {where} has"
                f" {resources.get('GPU', 0):g}: set nproc_per_node={max(1, int(resources.get('GPU', 0)))}, or --device cpu"
            )

    def _train(self, order: Mapping[str, Any], storage: Path) -> None:
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        from distributed.backends._ray.callbacks import made
        from distributed.backends._ray.worker import train

        budget = self._request.max_restarts
        is_gpu = self._request.device == "cuda"
        # TorchTrainer is this with a process group in each Ray worker. Ours is in the process that the worker starts.
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
        """In the placement group of a trial, whose first bundle holds the trial itself. Ray Train would ask for another."""
        from ray.util.placement_group import PlacementGroup
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from distributed.backends._ray.worker import Restart, work

        ray = self._ray
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(str(self._group))))
        places = self._places(group.bundle_specs)
        task = ray.remote(max_retries=0)(work)
        is_wanted = True
        while is_wanted:
            tasks = [
                task.options(
                    num_cpus=self._cpus, num_gpus=int(self._request.device == "cuda"),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
                ).remote(order, rank)
                for rank, place in enumerate(places)
            ]  # fmt: skip
            failed = [_has_failed(ray, each, Restart) for each in tasks]  # waits for every one
            is_wanted = any(failed)

    def _places(self, bundles: list[dict[str, float]]) -> list[int]:
        """The bundle of each rank. Raises ResourceError where they do not fit in."""
        wanted = {"CPU": self._cpus, **({"GPU": 1.0} if self._request.device == "cuda" else {})}
        places = [
            index
            for index, bundle in enumerate(bundles)
            for _ in range(int(min(bundle.get(name, 0.0) / amount for name, amount in wanted.items())))
            if index > 0
        ]
        processes = self._request.nproc_per_node
        if len(places) < processes:
            raise ResourceError(
                f"nproc_per_node={processes} is more than the {len(places)} that fit into the trial's placement group beside the"
                f" trial: give it tune.PlacementGroupFactory([{{'CPU': 1}}] + [{wanted}] * {processes})"
            )
        return places[:processes]


def own_token() -> dict[str, str]:
    """The environment of a cluster that is nobody else's: it knows its token from there alone, not from the user's home."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_own(ray: Any, scratch: Path, cpus: int, object_store_bytes: int, **settings: Any) -> None:
    """Start a cluster of our own under `own_token`, with its files below `scratch`, and connect to it."""
    with _on_loopback():
        ray.init(
            "local", num_cpus=cpus, include_dashboard=False, object_store_memory=object_store_bytes,
            # Ray opens whatever it makes to everyone, this directory too: so it is one that lies in one of ours.
            _temp_dir=str(claim(scratch) / "r"),
            # Workers of Ray Train have an environment of their own: those started in advance would serve nobody.
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False}, **settings,
        )  # fmt: skip


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray's servers listen on the loopback interface alone, as they do by themselves on macOS: on Linux Ray puts another
    address of this machine in the place of a 127.0.0.1 that it is given, and its servers then listen on all interfaces."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def new_scratch() -> Path:
    """A name for the files of a cluster of our own. A short one: Ray's sockets lie below it, and their names may have 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _LONGEST_DIRECTORY else "/tmp", f"ray-{secrets.token_hex(4)}")


def check_place(address: str | None, processes: int, cpus: float) -> None:
    """Whether the workers have a place, as far as that can be seen without Ray. Raises ResourceError."""
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
    """Ray waits for ever for CPUs that it does not have. Raises ResourceError."""
    if processes * cpus <= there:
        return
    if there < cpus:
        raise ResourceError(
            f"ray.cpus_per_worker={cpus:g} is more than the {there:g} CPUs of {where}: set it to {there:g}"
        )
    raise ResourceError(
        f"nproc_per_node={processes} with ray.cpus_per_worker={cpus:g} needs {processes * cpus:g} CPUs, and {where} has"
        f" {there:g}: set nproc_per_node={int(there / cpus)}, or ray.cpus_per_worker={int(1000 * there / processes) / 1000:g}"
    )


def _local_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _has_failed(ray: Any, task: Any, wanted: type[Exception]) -> bool:
    """Wait for a worker; whether its end asks for all of them again."""
    try:
        ray.get(task)
    except (wanted, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
        return True
    return False


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Of `HOST:PORT`, `[::1]:PORT` and `ray://HOST:PORT`; None for `auto` and the like."""
    match = _ADDRESS.fullmatch(address)
    return (match[1].strip("[]"), int(match[2])) if match and int(match[2]) < 1 << 16 else None


def _setting(address: str) -> str:
    """The address beside the name of where it was given."""
    name = "RAY_ADDRESS" if address == os.environ.get("RAY_ADDRESS") else "address"
    return f"{name}={address!r}"


def _unreached(address: str, said: str) -> ResourceError:
    """What to do about a cluster that Ray itself does not reach."""
    if address == "auto":
        return ResourceError(
            f"{_setting(address)} finds no Ray cluster on this machine: start one with 'ray start --head', name one as HOST:PORT, or"
            " drop it to use one of its own"
        )
    lines = [line for line in said.splitlines() if line.strip()]
    return ResourceError(
        f"the Ray cluster at {address} was not joined ({lines[-1] if lines else 'no answer'}): 'ray status' there shows whether"
        " it is well; both sides must have one version of Ray and one RAY_AUTH_MODE"
    )


def _reach(address: str, host: str, port: int) -> None:
    """Raise ResourceError where nothing listens, or something else than Ray: bare Ray waits there for ever."""
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
                f"{_setting(address)} is not Ray's: name the port that 'ray start --head' printed (6379), or ray://HOST:10001"
            )


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether the other side begins with a SETTINGS frame, as every HTTP/2 server does (RFC 9113, 3.4)."""
    connection.settimeout(_ANSWER_S)
    header = b""
    with contextlib.suppress(OSError):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while len(header) < 4 and (more := connection.recv(64)):
            header += more
    return header[3:4] == b"\4"
